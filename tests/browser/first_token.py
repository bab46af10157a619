"""How soon the first token is on the page: `python -m pytest -s tests/browser/first_token.py` on a free machine.

No test by its name: a floor in seconds says something of two free cores only. That the first token is shown when there
is no other, on any machine, is tested in `test_conversation.py`.
"""

import json
from collections.abc import Callable

from helpers.browser import Chat, Server

FLOOR = 2.0  # seconds from the click, bundled pair, two CPU cores
FIRST = """() => {
  document.querySelector("#df-box .submit-button").addEventListener("click", () => {
    window.asked ??= performance.now();
  }, true);
  new MutationObserver(() => {
    const text = document.querySelector(".df-answer:not([data-state=example]) .df-text")?.textContent;
    if (text) window.shown ??= performance.now();
  }).observe(document.body, { childList: true, subtree: true, characterData: true });
}"""


def test_first_token_comes_soon(bundled: Server, open_chat: Callable[..., Chat]) -> None:
    chat = open_chat(bundled)
    chat.page.evaluate(FIRST)
    chat.ask(bundled.question())
    seconds = chat.page.evaluate("(window.shown - window.asked) / 1000")
    print(json.dumps({"first_token_shown_after_seconds": round(seconds, 3)}))
    assert 0 < seconds < FLOOR
