"""From a path or a hub id to a local folder."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from diffusiongemma.errors import CheckpointError

CHECKPOINT_PATTERNS = ("*.safetensors", "*.json", "*.jinja")  # what is downloaded: never *.bin, *.pt or code
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)


def resolve(
    path_or_id: str | os.PathLike[str],
    revision: str | None = None,
    offline: bool | None = None,
    patterns: Sequence[str] = CHECKPOINT_PATTERNS,
) -> Path:
    """The local folder of a checkpoint; a hub id is downloaded (or found in the cache) first.

    `offline`: use only what is on this machine; None asks the environment variable HF_HUB_OFFLINE.
    """
    text = os.fspath(path_or_id)
    try:
        folder = Path(text).expanduser()
        is_dir, exists = folder.is_dir(), folder.exists()
    except (OSError, ValueError, RuntimeError) as error:  # a NUL byte, a name too long, no home folder
        raise CheckpointError(f"{text!r} is not a path: {error}") from None
    if is_dir:
        if revision is not None:
            raise CheckpointError(f"{text} is a local folder, so revision {revision!r} means nothing: leave it out")
        return folder
    if exists:
        raise CheckpointError(f"{text} is a file: give the folder that holds config.json and the weights")
    if not _HUB_ID.fullmatch(text):
        raise CheckpointError(f"no folder {text}: give a checkpoint folder, or a hub id such as 'owner/name'")
    return _download(text, revision, offline, patterns)


def _download(repo_id: str, revision: str | None, offline: bool | None, patterns: Sequence[str]) -> Path:
    from huggingface_hub import constants, errors, snapshot_download  # only here: it takes a while to import

    if offline is None:
        offline = constants.HF_HUB_OFFLINE or os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    what = f"{repo_id} (revision {revision})" if revision else repo_id
    try:
        folder = snapshot_download(repo_id, revision=revision, allow_patterns=list(patterns), local_files_only=offline)
    except errors.GatedRepoError:
        message = f"{what} is gated: accept its terms on its hub page, then log in with `hf auth login`"
    except errors.RepositoryNotFoundError:
        message = f"no {repo_id} on the hub, or it is private: check the spelling, or log in with `hf auth login`"
    except errors.RevisionNotFoundError:
        message = f"{repo_id} has no revision {revision!r}: give a branch, a tag or a commit that exists"
    except errors.HFValidationError as error:
        message = f"{repo_id} is not a valid hub id: {_first_line(error)}"
    except errors.LocalEntryNotFoundError as error:
        if offline:
            message = f"{what} is not complete in the local cache, and offline mode is on: unset HF_HUB_OFFLINE once"
        else:
            message = f"the hub cannot be reached, and {what} is not complete in the local cache: {_first_line(error)}"
    except Exception as error:  # the hub's transport library, and so its errors, changes with its version
        message = f"{what} could not be downloaded: {type(error).__name__}: {_first_line(error)}"
    else:
        return Path(folder)
    raise CheckpointError(f"{message} (nor is there a local folder {repo_id})")


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "no reason given")
