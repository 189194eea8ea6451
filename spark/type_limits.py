"""The limits of the types that the schemas of values become in Spark."""

from __future__ import annotations

from typing import Final

LEVELS_MAX: Final = 63
"""The maximum depth of a type. A struct or array is one level, a map is two, and the innermost
value is one more. Arrow sends at most 64 levels, and PySpark puts each row into a struct."""

FIELDS_MAX: Final = 10_000
"""The maximum number of fields of a type. If several fields have the same type, the fields of this
type count again for each of them: 60 types, each with two fields of the next one, would be a type
of 10 to the power of 18 fields."""
