"""An HTTP server that speaks the OpenAI completion APIs.

The engine runs in a thread of its own; a request is a ticket whose pieces arrive in the
event loop. A client that goes away cancels its ticket, which frees the slot.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hmac
import json
import threading
from collections.abc import AsyncIterator
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from jspec.serve import answers, protocol
from jspec.serve.engine import SERVED, Engine
from jspec.serve.metrics import Metrics
from jspec.serve.protocol import Call, Refused
from jspec.serve.request import Full, Piece, Ticket

_LOOK = 0.25  # seconds between two looks whether a client is still there


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a request may ask for.

    Attributes:
      body: bytes.  tokens: new tokens of one request.
    """

    body: int = 1 << 20
    tokens: int = 1024


class Server:
    """Answers for one engine; ``app`` is the ASGI application.

    Args:
      engine: started and stopped with the application.
      name: of the model, in answers.
      api_key: clients must send it as a bearer token; None lets everybody in.
      limits: of a request.

    Raises:
      ValueError: the model has no tokenizer.
    """

    def __init__(
        self,
        engine: Engine,
        name: str,
        api_key: str | None = None,
        limits: Limits | None = None,
    ):
        if engine.programs.model.tokenizer is None:
            raise ValueError(f"{name} has no tokenizer; a server needs one for texts")
        self._engine, self._name, self._key = engine, name, api_key
        self._limits = limits or Limits()
        self._metrics = Metrics(engine)
        self._stop = threading.Event()
        self.app = Starlette(
            routes=[
                Route("/v1/completions", self._completions, methods=["POST"]),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/v1/models", self._models),
                Route("/metrics", self._expose),
                Route("/health", self._health),
            ],
            exception_handlers={HTTPException: self._error, Exception: _failure},
            lifespan=self._lifespan,
        )

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        if self._engine.serving:
            raise RuntimeError(SERVED)
        thread = threading.Thread(target=self._serve, name="jspec-engine", daemon=True)
        thread.start()
        yield
        self._stop.set()
        await run_in_threadpool(thread.join)

    def _serve(self) -> None:
        with contextlib.suppress(Exception):  # kept in engine.failure
            self._engine.serve(self._stop)

    # --- routes -------------------------------------------------------------------

    async def _completions(self, request: Request) -> Response:
        body = await self._body(request)
        return await self._answer(
            request, lambda: protocol.completion(body, self._limits.tokens)
        )

    async def _chat(self, request: Request) -> Response:
        body = await self._body(request)
        return await self._answer(
            request, lambda: protocol.chat(body, self._limits.tokens, self._template)
        )

    async def _models(self, request: Request) -> Response:
        self._authorise(request)
        card = {"id": self._name, "object": "model", "created": 0, "owned_by": "jspec"}
        return JSONResponse({"object": "list", "data": [card]})

    async def _expose(self, request: Request) -> Response:
        text = generate_latest(self._metrics.registry)
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    async def _health(self, request: Request) -> Response:
        running, waiting = self._engine.load
        failure = self._engine.failure
        fields: dict = {"status": "ok", "running": running, "waiting": waiting}
        if failure is not None:
            fields |= {"status": "failed", "reason": str(failure)}
        return JSONResponse(fields, 200 if failure is None else 503)

    async def _error(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        self._metrics.refused(error.status_code)
        kind = "server_error" if error.status_code >= 500 else "invalid_request_error"
        param = getattr(error, "param", None)
        fields = answers.error(str(error.detail), kind, param)
        return JSONResponse(fields, error.status_code, headers=error.headers)

    # --- a request ----------------------------------------------------------------

    def _authorise(self, request: Request) -> None:
        if self._key is None:
            return
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), self._key.encode()):
            raise HTTPException(401, "the API key is missing or wrong")

    async def _body(self, request: Request) -> dict:
        self._authorise(request)
        data = bytearray()
        async for part in request.stream():
            data += part
            if len(data) > self._limits.body:
                raise HTTPException(
                    413, f"the body is larger than {self._limits.body} bytes"
                )
        try:
            body = json.loads(bytes(data))
        except ValueError as error:
            raise HTTPException(400, f"the body is not JSON: {error}") from error
        if not isinstance(body, dict):
            raise HTTPException(400, "the body must be a JSON object")
        return body

    def _template(self, messages: list[dict]) -> list[int]:
        tokenizer = self._engine.programs.model.tokenizer
        if tokenizer.chat_template is None:
            raise Refused(
                "the model has no chat template; use /v1/completions", "messages"
            )
        return tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )

    async def _answer(self, request: Request, understand: Any) -> Response:
        inbox: asyncio.Queue[Piece] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def sink(piece: Piece) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(inbox.put_nowait, piece)

        def submit() -> tuple[Call, Ticket]:
            call = understand()
            prepared = self._engine.prepare(call.prompt, **call.options)
            return call, self._engine.submit(
                prepared, speculate=call.speculate, seconds=call.seconds, sink=sink
            )

        if self._engine.failure is not None:
            raise HTTPException(503, f"the engine has failed: {self._engine.failure}")
        try:
            call, ticket = await run_in_threadpool(submit)
        except Full as error:
            raise HTTPException(
                429, str(error), headers={"Retry-After": "1"}
            ) from error
        except ValueError as error:
            refusal = HTTPException(400, str(error))
            refusal.param = getattr(error, "param", None)  # type: ignore[attr-defined]
            raise refusal from error
        pieces = self._pieces(request, ticket, inbox)
        if call.stream:
            events = self._events(call, ticket, pieces)
            return StreamingResponse(events, media_type="text/event-stream")
        async for _ in pieces:
            pass
        if ticket.error is not None:
            raise HTTPException(500, str(ticket.error))
        if ticket.finish_reason not in answers.FINISH:
            raise HTTPException(503, "the request was cancelled")
        answer = answers.whole(call, self._name, ticket.result(), self._token)
        return JSONResponse(answer)

    async def _pieces(
        self, request: Request, ticket: Ticket, inbox: asyncio.Queue[Piece]
    ) -> AsyncIterator[Piece]:
        """The ticket's pieces; however this ends, the ticket does not outlive it."""
        try:
            while True:
                try:
                    piece = await asyncio.wait_for(inbox.get(), _LOOK)
                except TimeoutError:
                    piece = None
                if piece is not None:
                    yield piece
                    if piece.finish_reason is not None:
                        break
                if await request.is_disconnected():
                    break
        finally:
            ticket.cancel()
            await asyncio.shield(run_in_threadpool(self._count, ticket))

    def _count(self, ticket: Ticket) -> None:
        with contextlib.suppress(Exception):  # what failed is told elsewhere
            self._metrics.ended(ticket.wait(60))

    async def _events(
        self, call: Call, ticket: Ticket, pieces: AsyncIterator[Piece]
    ) -> AsyncIterator[str]:
        async with contextlib.aclosing(pieces):  # type: ignore[type-var]
            async for piece in pieces:
                if ticket.error is not None:
                    fields = answers.error(str(ticket.error), "server_error")
                    yield answers.event(fields)
                    return
                if piece.finish_reason in (None, *answers.FINISH):
                    yield answers.chunk(call, self._name, piece, self._token)
        if ticket.finish_reason in answers.FINISH:
            if call.usage_chunk:
                yield answers.last_chunk(call, self._name, ticket.result())
            yield "data: [DONE]\n\n"

    def _token(self, token: int) -> str:
        return self._engine.programs.model.tokenizer.decode([token])


async def _failure(request: Request, error: Exception) -> Response:
    return JSONResponse(
        answers.error(f"{type(error).__name__}: {error}", "server_error"), 500
    )
