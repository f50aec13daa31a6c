"""The version of qkov. The four packages are installed together, as one distribution."""

from importlib.metadata import version

__version__ = version("qkov")
