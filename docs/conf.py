"""How Sphinx builds the site: `sphinx-build -W --keep-going docs docs/_build`."""

import sys
from importlib.metadata import version as installed_version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

project = "qkov"
author = "The qkov maintainers"
project_copyright = "The qkov maintainers"
version = release = installed_version("qkov")

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx-mathjax-offline",
    "docstrings",
]
exclude_patterns = ["_build", "**/.ipynb_checkpoints"]

html_theme = "furo"
html_title = "qkov"
html_static_path = ["_static"]
html_css_files = ["qkov.css"]
html_show_sourcelink = False

myst_enable_extensions = ["amsmath", "deflist", "dollarmath"]
myst_heading_anchors = 3
# The notebooks are saved with their outputs, and the tests run them.
nb_execution_mode = "off"

copybutton_prompt_text = "$ "
copybutton_only_copy_prompt_lines = True

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "show-inheritance": True}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
# Shapes such as "*batch" would be taken for markup; the signatures show them.
napoleon_attr_annotations = False
napoleon_use_rtype = False
