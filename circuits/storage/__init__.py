"""Bytes wherever they are stored: on this machine, on a web server, on a hub, or at any address that fsspec knows."""
