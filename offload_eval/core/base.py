"""The common form of every stored type, and the scalar types that fields share."""

from typing import Annotated, Final

import msgspec
from msgspec import Meta

PositiveInt = Annotated[int, Meta(ge=1)]
NonNegativeInt = Annotated[int, Meta(ge=0)]
PositiveNumber = Annotated[float, Meta(gt=0)]
Text = Annotated[str, Meta(min_length=1)]
Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=80)]
DATE_PATTERN: Final = r"^\d{4}-\d{2}-\d{2}$"
Date = Annotated[str, Meta(pattern=DATE_PATTERN)]


class Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Frozen, keyword-only, and refusing keys it does not know."""
