"""One clear line when an installed library is not supported, instead of a failure deep inside it."""

from importlib.metadata import PackageNotFoundError, requires, version

from ...circuits.errors import QkovError


def demand_supported(*libraries: str) -> None:
    """Refuse a library whose installed version is outside the range that qkov's own metadata states.

    The metadata comes from `pyproject.toml`, so that the ranges are stated in one place. A command calls this for the
    libraries that it is about to import.

    Args:
        libraries: The names under which the libraries are distributed, as they stand in `pyproject.toml`.

    Raises:
        QkovError: A library is missing or its version is not supported.
    """
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet

    requirements = [Requirement(text) for text in requires("qkov") or ()]
    ranges = {
        requirement.name: requirement.specifier
        for requirement in requirements
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    }
    for library in libraries:
        supported = ranges.get(library, SpecifierSet())
        remedy = f"run: pip install -U '{library}{supported}'"
        try:
            installed = version(library)
        except PackageNotFoundError:
            raise QkovError(f"{library} is not installed, but qkov needs {library}{supported}; {remedy}") from None
        if not supported.contains(installed, prereleases=True):
            raise QkovError(f"{library} {installed} is installed, but qkov needs {library}{supported}; {remedy}")
