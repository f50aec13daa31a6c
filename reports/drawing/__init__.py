"""Charts and heat maps as inline SVG."""
