"""What stands before several servers of a model: a request whose server dies is asked again elsewhere."""

import logging

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jdllm.api.answers import DONE, EVENTS, event
from jdllm.api.errors import ApiError

ATTEMPTS = 3
"""Times that a request is asked. A request that ends every server it meets must not end all of them."""

_log = logging.getLogger("jdllm.api")


class Retries:
    """Asks again for a request whose answer breaks off before its first byte, and ends a stream that breaks
    off with an error.

    Arguments:
    - `app`: hands requests to the servers. Where a server dies, `app` returns without the end of the answer.
    """

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body, answer = _Body(receive), _Answer(send)
        for _ in range(ATTEMPTS):
            await self._app(dict(scope), body.from_its_beginning(), answer)
            if answer.ended or answer.begun or body.client_gone:
                break
            _log.warning("the server of a request has died before it answered: %s", scope["path"])
        if answer.ended or body.client_gone:
            return
        error = ApiError(503, "the server of this request has died", code="server_died")
        if not answer.begun:
            await error.response()(scope, receive, send)
        elif answer.streams:
            last = event(error.body()) + DONE
            await send({"type": "http.response.body", "body": last, "more_body": False})


def proxy_middlewares() -> list[Middleware]:
    """What Ray puts before its proxies, where RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH names this
    function."""
    return [Middleware(Retries)]


class _Body:
    """The messages of a client, which can be received again from the first one on.

    `client_gone` says whether the client has left.
    """

    def __init__(self, receive: Receive):
        self._receive = receive
        self._received: list[Message] = []
        self.client_gone = False

    def from_its_beginning(self) -> Receive:
        """A `receive` of all messages."""
        before = iter(list(self._received))

        async def receive() -> Message:
            message = next(before, None)
            if message is None:
                message = await self._receive()
                self._received.append(message)
                self.client_gone = message["type"] == "http.disconnect"
            return message

        return receive


class _Answer:
    """Takes an answer, and holds its head back until its first bytes are there.

    `begun` says whether the client has the head, `ended` whether the client has everything, and `streams`
    whether the answer is a stream of events.
    """

    def __init__(self, send: Send):
        self._send = send
        self._head: Message | None = None
        self.begun = self.ended = self.streams = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            # The server names the request, and so does Ray.
            headers = list(dict.fromkeys((bytes(name), bytes(value)) for name, value in message["headers"]))
            self._head = {**message, "headers": headers}
            return
        if self._head is not None:
            kind = dict(self._head["headers"]).get(b"content-type", b"")
            self.streams = kind.startswith(EVENTS.encode())
            head, self._head, self.begun = self._head, None, True
            await self._send(head)
        self.ended = not message.get("more_body", False)
        await self._send(message)
