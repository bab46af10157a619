"""Gradio's own chat page for any server with OpenAI's interface: `python web_chat.py ADDRESS MODEL PORT`."""

from __future__ import annotations

import sys

import gradio as gr


def main(address: str, model: str, port: str) -> None:
    """Serves the page until it is ended."""
    page = gr.load_chat(
        address, model=model, token="none", file_types=["image", "text_encoded"], title=model
    )
    page.launch(server_name="127.0.0.1", server_port=int(port), quiet=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
