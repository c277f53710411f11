"""headpool: fewer key/value heads for pretrained language models."""

__version__ = "0.1.0"
