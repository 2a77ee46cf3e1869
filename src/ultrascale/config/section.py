"""What all sections of a config are, and the numbers in them."""

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


def integral(value: object) -> object:
    """YAML 1.2 reads 1e6 as a float; it is a fine way to write a count. 2.5 stays a float, and is refused."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Positive = Annotated[int, Field(ge=1), BeforeValidator(integral)]
NonNegative = Annotated[int, Field(ge=0), BeforeValidator(integral)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )
