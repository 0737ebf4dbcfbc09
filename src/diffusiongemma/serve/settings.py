"""How a server is set up; each default is written once, here."""

from __future__ import annotations

import ipaddress
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path

from diffusiongemma.errors import ConfigError

KEYS_VARIABLE = "DGEMMA_API_KEYS"
MIN_KEY = 16
_FLAGS = {"cache": "cache (--cache-mib)", "max_body": "max_body (--max-body-mib)"}  # in bytes here
MAX_NAME = 256  # characters, as `model` of a request may have


@dataclass(frozen=True)
class Settings:
    model: str = "nano"
    name: str | None = None  # as clients call it; None: the model's own name
    device: str = "auto"
    dtype: str = "auto"
    host: str = "127.0.0.1"
    port: int = 8000
    keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    batch: int | None = None  # rows that run at once; None: 4 on a CPU, 16 on a GPU
    cache: int = 2 << 30  # bytes of K/V cache, running rows and kept prefixes together
    packed: bool | None = None  # as `Limits.packed`
    queue: int = 128  # requests that wait
    max_tokens: int = 4096  # new tokens of one request
    request_seconds: float = 300.0
    receive_seconds: float = 30.0  # for a request to arrive whole
    stall_seconds: float = 30.0  # a reader that takes nothing for so long is disconnected
    max_body: float = 4 << 20  # bytes
    max_head: int = 32 << 10
    connections: int = 1024
    grace: float = 30.0  # seconds that running requests have when the server is stopped
    log_json: bool = False
    log_file: Path | None = None

    def __post_init__(self) -> None:
        problems = [
            f"{_FLAGS.get(name, name)} must be a number of at least {least}, got {value}"
            for name, least in (
                ("cache", 1), ("queue", 1), ("max_tokens", 1), ("request_seconds", 0.1), ("receive_seconds", 0.1),
                ("stall_seconds", 0.1), ("max_body", 1024), ("max_head", 1024), ("connections", 1), ("grace", 0),
            )
            if not least <= (value := getattr(self, name)) < math.inf
        ]  # fmt: skip
        if self.name is not None and not 0 < len(self.name) <= MAX_NAME:
            problems.append(f"name must have from 1 to {MAX_NAME} characters, got {len(self.name)}")
        if self.batch is not None and self.batch < 1:
            problems.append(f"batch must be at least 1, got {self.batch}")
        if not 0 <= self.port <= 65535:
            problems.append(f"port must be from 0 to 65535, got {self.port}")
        if any(len(key) < MIN_KEY for key in self.keys):
            problems.append(f"an API key must have at least {MIN_KEY} characters")
        if any(not re.fullmatch(r"[\x21-\x7e]+", key) for key in self.keys):
            problems.append("an API key must consist of visible ASCII characters")
        if bad := [o for o in self.cors_origins if not re.fullmatch(r"https?://[^/\s*]+", o)]:
            problems.append(f"a CORS origin looks like https://example.org, got {bad[0]!r}")
        if not self.keys and not is_loopback(self.host):
            problems.append(
                f"{self.host} can be reached from other machines, so API keys are needed: "
                f"give --api-key-file, or set {KEYS_VARIABLE}"
            )
        if problems:
            raise ConfigError("the server cannot be set up like this", problems)


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def read_keys(file: Path | None) -> tuple[str, ...]:
    """Keys of the file, one a line (empty lines and # comments left out), and of the environment."""
    found = re.split(r"[\s,]+", os.environ.get(KEYS_VARIABLE, ""))
    if file is not None:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the API keys in {file}: {error}") from None
        given = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
        if not given:
            raise ConfigError(f"{file} holds no API key: write one a line")
        found += given
    return tuple(dict.fromkeys(key for key in found if key))
