"""The studio as gradio shows it: tabs, downloads and the server that guards them."""
