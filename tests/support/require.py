"""What a test needs and this machine may not have: its absence skips, or fails where it must be there."""

import os
from typing import NoReturn

import pytest


def missing(reason: str, variable: str) -> NoReturn:
    """Skip for this reason; fail where the environment variable is 1, as `make test` sets it for what it installs."""
    if os.environ.get(variable) == "1":
        pytest.fail(f"{variable}=1, but {reason}")
    pytest.skip(reason)
