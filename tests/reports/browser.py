"""A browser on a page, as a person uses it: it is asked by the protocol of its developer tools."""

import asyncio
import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp

#: Seconds that anything in the browser may take.
LIMIT = 60.0


class Tab:
    """A tab of a browser that shows a page."""

    def __init__(self, port: int, url: str, width: int) -> None:
        self._port, self._url, self._width = port, url, width
        self._count = 0

    def opened(self, *scripts: str) -> list[Any]:
        """What scripts return, one after the other, in a page that stays open; a promise is waited for."""
        return asyncio.run(asyncio.wait_for(self._opened(scripts), LIMIT))

    async def _opened(self, scripts: tuple[str, ...]) -> list[Any]:
        async with aiohttp.ClientSession() as session:
            async with session.put(f"http://127.0.0.1:{self._port}/json/new?about:blank") as answer:
                address = (await answer.json(content_type=None))["webSocketDebuggerUrl"]
            async with session.ws_connect(address, max_msg_size=0) as tab:
                size = {"width": self._width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
                await self._ask(tab, "Emulation.setDeviceMetricsOverride", **size)
                await self._ask(tab, "Page.navigate", url=self._url)
                loaded = "new Promise(r => document.readyState === 'complete' ? r() : addEventListener('load', r))"
                return [
                    (await self._ask(tab, "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True))
                    for script in (loaded, *scripts)
                ][1:]

    async def _ask(self, tab: aiohttp.ClientWebSocketResponse, method: str, **parameters: Any) -> Any:
        self._count += 1
        await tab.send_json({"id": self._count, "method": method, "params": parameters})
        while True:
            answer = json.loads((await tab.receive()).data)
            if answer.get("id") == self._count:
                assert "error" not in answer, answer
                result = answer["result"]
                assert "exceptionDetails" not in result, result
                return result.get("result", {}).get("value")


@contextmanager
def browser(chromium: str, folder: Path) -> Iterator[int]:
    """Run a browser and give the port of its developer tools."""
    command = [
        chromium,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--remote-debugging-port=0",
    ]
    process = subprocess.Popen(
        [*command, f"--user-data-dir={folder}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        stated, until = folder / "DevToolsActivePort", time.monotonic() + LIMIT
        while not (stated.is_file() and stated.read_text().count("\n")):
            assert process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.05)
        yield int(stated.read_text().split()[0])
    finally:
        process.terminate()
        process.wait(timeout=LIMIT)
