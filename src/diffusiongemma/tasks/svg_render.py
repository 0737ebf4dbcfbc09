"""Pictures of SVG: resvg draws them; what it gets has always been through the sanitiser."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from diffusiongemma.errors import InputError, SvgError
from diffusiongemma.tasks.svg_safe import Drawing, read

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

MAX_SIZE = 1_024


def render(svg: str, size: int = 256, background: str | None = None) -> bytes:
    """A PNG whose longer side has `size` pixels, transparent or on a `background` such as `#ffffff`."""
    return render_drawing(read(svg), size, background)


def render_drawing(drawing: Drawing, size: int = 256, background: str | None = None) -> bytes:
    try:
        import resvg_py
    except ImportError as error:
        raise InputError(f"icons are drawn by resvg-py: pip install resvg-py ({error})") from None
    if not 1 <= size <= MAX_SIZE:
        raise InputError(f"a picture is from 1 to {MAX_SIZE} pixels wide, not {size}")
    try:
        # Without text there is nothing to load fonts for, which would take most of the time.
        return resvg_py.svg_to_bytes(svg_string=drawing.markup(size), background=background, skip_system_fonts=True)
    except BaseException as error:  # a Rust panic is no Exception in Python
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise SvgError(f"this SVG cannot be drawn: {error}") from error
        raise


def coverage(png: bytes) -> npt.NDArray[np.float32]:
    """[height, width] from 0 (nothing drawn there) to 1"""
    import numpy as np

    try:
        from PIL import Image
    except ImportError as error:
        raise InputError(f"pictures are read by pillow: pip install pillow ({error})") from None
    with Image.open(io.BytesIO(png)) as image:
        alpha = np.asarray(image.convert("RGBA").getchannel("A"), np.float32)
    return alpha / np.float32(255)
