"""The console's pages and scripts: files of router/console/static/, served without a key.

They carry no data. A strict Content-Security-Policy keeps them from loading or telling anything
elsewhere.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.staticfiles import StaticFiles

STATIC: Final = Path(__file__).parent / "static"
INDEX: Final = "index.html"
POLICY: Final = "; ".join(
    (
        "default-src 'none'", "script-src 'self'", "style-src 'self'", "img-src 'self' data:",
        "connect-src 'self'", "font-src 'self'", "base-uri 'none'", "form-action 'none'",
        "frame-ancestors 'none'",
    )
)  # fmt: skip
HEADERS: Final = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",  # kept, and asked for again by its ETag
}


class ConsolePages:
    """The routes of the pages. `folder`: where the files lie."""

    def __init__(self, folder: Path = STATIC) -> None:
        self._files = StaticFiles(directory=folder, check_dir=False)

    def routes(self) -> list[Route]:
        return [
            Route("/console", self.page, methods=["GET"]),
            Route("/console/", self.page, methods=["GET"]),
            Route("/console/{file:path}", self.page, methods=["GET"]),
        ]

    async def page(self, request: HttpRequest) -> Response:
        """Return a file. Raises HTTPException (404) if there is none."""
        name = str(request.path_params.get("file", INDEX))
        response = await self._files.get_response(name, request.scope)
        response.headers.update(HEADERS)
        return response
