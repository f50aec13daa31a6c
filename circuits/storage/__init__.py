"""Bytes wherever they are stored: on this machine, a web server or a hub, or at any address that fsspec supports."""
