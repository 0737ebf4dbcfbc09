"""The data of the embedded model from the command line, one step a command, all under one folder (`--out`)."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from diffusiongemma.errors import DiffusionGemmaError


def _build(args: argparse.Namespace) -> None:
    from diffusiongemma.train.data.corpus import assemble, collect, humaneval_filter
    from diffusiongemma.train.data.packages import read_packages

    corpus = args.out / "corpus"
    packages = read_packages()
    if args.limit:
        packages = packages[: args.limit]
    problems = collect(packages, corpus, keep_archives=args.keep_archives)
    for problem in problems:
        print("left out:", problem, file=sys.stderr)
    manifest = assemble(packages, corpus, humaneval_filter(corpus))
    print(json.dumps({"splits": manifest["splits"], "dropped": manifest["dropped"], "left_out": len(problems)}))


def _sudoku(args: argparse.Namespace) -> None:
    from diffusiongemma.train.data.sudoku_sets import build_base, build_eval

    folder = args.out / "eval"
    print(json.dumps(build_eval(folder)), flush=True)
    tests = sorted(folder.glob("sudoku_*.txt"))
    print(json.dumps(build_base(args.out / "sudoku.npz", args.count, tests, args.expansions)))


def _icons(args: argparse.Namespace) -> None:
    from diffusiongemma.train.data.icons import build_icons

    report = build_icons(args.out / "icons")
    print(json.dumps({key: report[key] for key in ("icons", "names", "bytes", "left_out_sets")}))


def _svg_set(args: argparse.Namespace) -> None:
    from diffusiongemma.train.data.svg_set import build_svg_set

    print(json.dumps(build_svg_set(args.out / "icons" / "icons_test.jsonl.gz", args.out / "eval/svg_names.jsonl.gz")))


def _tokenizer(args: argparse.Namespace) -> None:
    from diffusiongemma.train.data import bpe

    made = bpe.train(bpe.sample(args.out / "corpus", args.out / "icons", args.megabytes), args.size)
    bpe.save(made, args.out / "tokenizer")
    print(json.dumps({"entries": made.get_vocab_size()}))


def _tokenize(args: argparse.Namespace) -> None:
    from diffusiongemma.train.data.shards import tokenize

    corpus, icons, tokenizer, tokens = (args.out / name for name in ("corpus", "icons", "tokenizer", "tokens"))
    print(json.dumps(tokenize(corpus, icons, tokenizer, tokens, args.workers)))


def _infill(args: argparse.Namespace) -> None:
    from diffusiongemma.train.data.infill_sets import build_infill

    print(json.dumps(build_infill(args.out / "corpus", args.out / "tokenizer", args.out / "eval", args.seed)))


def _pack(args: argparse.Namespace) -> None:
    from diffusiongemma.train.data.transport import pack

    wanted = {"code": args.code, "docs": args.docs}
    most = {name: round(millions * 1e6) for name, millions in wanted.items() if millions is not None}
    report = pack(args.out / "tokens", args.out / "sudoku.npz", args.out / "transport", most)
    sizes = {f"part{number}": size for number, size in enumerate(report["bytes"], 1)}
    sizes["in all"] = sum(report["bytes"])
    print(", ".join(f"{name}: {size / (1 << 20):.1f} MiB" for name, size in sizes.items()))


def _unpack(args: argparse.Namespace) -> None:
    from diffusiongemma.train.data.transport import unpack

    print(json.dumps(unpack(args.parts, args.out, args.workers)))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m diffusiongemma.train.data", description=__doc__)
    commands = parser.add_subparsers(required=True)
    build = commands.add_parser("build", help="code and docs of the listed packages")
    build.add_argument("--limit", type=int, default=0, help="only the first N packages")
    build.add_argument("--keep-archives", action="store_true", help="do not delete an archive once it is read")
    build.set_defaults(run=_build)
    sudoku = commands.add_parser("sudoku", help="the base set of puzzles and the test sets")
    sudoku.add_argument("--count", type=int, default=1_000_000, help="puzzles in the base set")
    sudoku.add_argument("--expansions", type=int, default=4_000, help="search steps for puzzles of 17 to 20 givens")
    sudoku.set_defaults(run=_sudoku)
    icons = commands.add_parser("icons", help="icons with names and tags")
    icons.set_defaults(run=_icons)
    svg_set = commands.add_parser("svg-set", help="held-out icon names for `dgemma eval svg`, from icons/ into eval/")
    svg_set.set_defaults(run=_svg_set)
    tokenizer = commands.add_parser("tokenizer", help="the BPE vocabulary, from corpus/ and icons/")
    tokenizer.add_argument("--size", type=int, default=8_192, help="entries, special tokens included")
    tokenizer.add_argument("--megabytes", type=float, default=60.0, help="text to learn from")
    tokenizer.set_defaults(run=_tokenizer)
    tokenize = commands.add_parser("tokenize", help="token arrays of corpus/ and icons/ into tokens/")
    tokenize.set_defaults(run=_tokenize)
    infill = commands.add_parser("infill", help="the test set of holes in held-out code, from corpus/ and tokenizer/")
    infill.add_argument("--seed", type=int, default=0, help="which holes are drawn")
    infill.set_defaults(run=_infill)
    pack = commands.add_parser("pack", help="tokens/ and sudoku.npz as compressed parts in transport/")
    pack.add_argument("--code", type=float, help="millions of tokens of code at most, in whole documents (all)")
    pack.add_argument("--docs", type=float, help="the same of documentation (all)")
    pack.set_defaults(run=_pack)
    unpack = commands.add_parser("unpack", help="token arrays and puzzles from such parts")
    unpack.add_argument("parts", type=Path, nargs="+", help="part folders, as many as are there")
    unpack.set_defaults(run=_unpack)
    for command in (tokenize, unpack):
        command.add_argument("--workers", type=int, default=1, help="processes")
    for command in (build, sudoku, icons, svg_set, tokenizer, tokenize, infill, pack, unpack):
        command.add_argument("--out", type=Path, required=True, help="the folder that gets the data")
    args = parser.parse_args()
    try:
        args.run(args)
    except DiffusionGemmaError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
