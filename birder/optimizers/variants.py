"""Methods with variants: an argument of the constructor says which, and each variant is a class in a file of its own."""

from __future__ import annotations

from typing import Any, ClassVar


class Variants:
    """A class whose constructor makes an instance of the subclass that one of its arguments names.

        class Method(Variants, BucketOptimizer, by="form"): ...
        class Released(Method, named="v2"): ...

    Then `Method(params, form="v2")` is a `Released`; so is what `Released(params, form="v2")` makes. Any other value of the
    argument makes a `Method`, whose constructor checks it.
    """

    variants: ClassVar[dict[str, type]]
    """The subclasses by their names; they enter themselves when their files are imported."""
    _method: ClassVar[type | None] = None
    _argument: ClassVar[str] = ""

    def __init_subclass__(cls, by: str | None = None, named: str | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if by is not None:
            cls._method, cls._argument, cls.variants = cls, by, {}
        if named is not None:
            cls.variants[named] = cls

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        named = kwargs.get(cls._argument)
        chosen = cls.variants.get(named, cls) if cls is cls._method and isinstance(named, str) else cls
        return super().__new__(chosen)
