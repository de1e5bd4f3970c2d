"""Libraries that not everybody needs: imported where they are used, or how to get them."""

import importlib
from typing import Any


def library(module: str, use: str, extra: str, package: str = "") -> Any:
    """Imports a module of an optional library.

    Args:
        module: Its name.
        use: What needs it, as the beginning of a sentence: "jdp.Parquet reads through pyarrow".
        extra: The extra of this distribution that brings it.
        package: What brings it alone, if that does.

    Raises:
        ImportError: If it is not installed, saying how to install it.

    Example:
        >>> library("no_such_module", "This reads through it", "data")
        Traceback (most recent call last):
        ImportError: This reads through it, which is not installed (No module named ...
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        alone = f", or {package} alone" if package else ""
        raise ImportError(
            f"{use}, which is not installed ({error}): pip install 'jdp-train[{extra}]'{alone}."
        ) from error
