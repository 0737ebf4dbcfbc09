"""The application: endpoints, error bodies, and the guards around them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import FileResponse, HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from diffusiongemma import __version__
from diffusiongemma.serve import canvas, chat, completions
from diffusiongemma.serve.errors import CLIENT_GONE, ApiError, from_validation
from diffusiongemma.serve.lifecycle import ServerState, server_of
from diffusiongemma.serve.logs import AccessLog
from diffusiongemma.serve.models import describe
from diffusiongemma.serve.page import STYLE, docs_page
from diffusiongemma.serve.replies import Health, Model, ModelList, Ready
from diffusiongemma.serve.route import GET_RESPONSES
from diffusiongemma.serve.security import Shield

log = logging.getLogger(__name__)
ROUTERS = (chat.router, completions.router, canvas.router)
STUDIO = Path(__file__).parent / "studio"
ABOUT = "The OpenAI API over DiffusionGemma, with the canvas while it settles, holes and edits. See docs/api.md."


def build_app(state: ServerState, on_loaded: Callable[[], None] = lambda: None) -> ASGIApp:
    """`on_loaded`: called when the model is there or cannot be loaded; `state.load_error` has the reason."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        loading = asyncio.create_task(_load(state, on_loaded))
        yield
        loading.cancel()
        await asyncio.to_thread(state.close)

    app = FastAPI(
        title="DiffusionGemma", version=__version__, description=ABOUT, lifespan=lifespan, docs_url=None,
        redoc_url=None, openapi_url=None, redirect_slashes=False,
    )  # fmt: skip
    app.state.server = state
    for router in ROUTERS:
        app.include_router(router)
    _add_models(app)
    _add_health(app)
    _add_pages(app, bool(state.settings.keys))
    _add_errors(app)
    routes = [*app.routes, *(route for router in ROUTERS for route in router.routes)]
    paths = frozenset(route.path for route in routes if isinstance(route, APIRoute))
    inner: ASGIApp = app
    if state.settings.cors_origins:
        inner = CORSMiddleware(
            app, state.settings.cors_origins, allow_methods=["GET", "POST"], allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )  # fmt: skip
    return AccessLog(Shield(inner, state.settings), state.metrics, paths)


async def _load(state: ServerState, on_loaded: Callable[[], None]) -> None:
    try:
        state.serve(await asyncio.to_thread(state.load))
        log.info("ready", extra={"fields": {"model": state.model_name}})
    except Exception as error:
        state.load_error = error
    on_loaded()


def _add_models(app: FastAPI) -> None:
    def model(http: HttpRequest) -> Model:
        server = server_of(http)
        return describe(server.engine, server.model_name, int(server.started))

    @app.get("/v1/models", response_model=ModelList, responses=GET_RESPONSES, summary="Which models are served")
    async def models(http: HttpRequest) -> Response:
        return JSONResponse(ModelList(data=[model(http)]).model_dump())

    @app.get("/v1/models/{model_id:path}", response_model=Model, responses=GET_RESPONSES, summary="One model")
    async def one_model(model_id: str, http: HttpRequest) -> Response:
        server_of(http).engine_for(model_id)
        return JSONResponse(model(http).model_dump())


def _add_health(app: FastAPI) -> None:
    @app.get("/health", response_model=Health, responses={503: {"model": Health}}, summary="Is the server well?")
    async def health(http: HttpRequest) -> Response:
        """503 if the engine failed several times in a row: start it anew."""
        found = server_of(http).health()
        return JSONResponse(found.model_dump(), 503 if found.status == "failing" else 200)

    @app.get("/ready", response_model=Ready, responses={503: {"model": Ready}}, summary="Does it take requests?")
    async def ready(http: HttpRequest) -> Response:
        status = server_of(http).status
        return JSONResponse(Ready(ready=status == "ok", status=status).model_dump(), 200 if status == "ok" else 503)

    @app.get(
        "/metrics", response_class=Response, summary="Figures for Prometheus",
        responses=GET_RESPONSES | {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
    )  # fmt: skip
    async def metrics(http: HttpRequest) -> Response:
        return Response(server_of(http).metrics.text(), media_type=CONTENT_TYPE_LATEST)


def _add_pages(app: FastAPI, has_keys: bool) -> None:
    document: dict[str, Any] = {}

    def openapi() -> dict[str, Any]:
        if not document:
            made = get_openapi(title=app.title, version=app.version, description=ABOUT, routes=app.routes)
            document.update(_tidy(made, has_keys))
        return document

    app.openapi = openapi  # type: ignore[method-assign]

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi_json() -> Response:
        return JSONResponse(openapi())

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return HTMLResponse(docs_page(openapi()))

    @app.get("/docs.css", include_in_schema=False)
    async def docs_css() -> Response:
        return Response(STYLE, media_type="text/css")

    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        page = STUDIO / "index.html"
        return FileResponse(page) if page.is_file() else RedirectResponse("/docs")

    if STUDIO.is_dir():
        app.mount("/studio", StaticFiles(directory=STUDIO), "studio")


def _tidy(document: dict[str, Any], has_keys: bool) -> dict[str, Any]:
    """FastAPI promises a 422 everywhere; here it is a 400 with OpenAI's body."""
    for path in document["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
    for name in ("HTTPValidationError", "ValidationError"):
        document["components"]["schemas"].pop(name, None)
    if has_keys:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return document


def _add_errors(app: FastAPI) -> None:
    async def api_error(http: HttpRequest, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        if error.status_code == CLIENT_GONE:
            http.scope["ended_as"] = CLIENT_GONE
        return error.response()

    async def http_error(http: HttpRequest, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path, message = http.url.path[:256], str(error.detail)
        if error.status_code == 404:
            message = f"there is no path {path}; /docs has those that there are"
        elif error.status_code == 405:
            message = f"{path} takes no {http.method}, only {(error.headers or {}).get('Allow', 'what /docs says')}"
        return ApiError(error.status_code, message, headers=error.headers).response()

    async def invalid(_: HttpRequest, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return from_validation(error.errors(), error.body).response()

    async def mistake(http: HttpRequest, error: Exception) -> Response:
        fields = {"request_id": http.scope.get("request_id")}
        log.error("a request failed by a mistake of the server", exc_info=error, extra={"fields": fields})
        return ApiError(500, "the server made a mistake", code="internal").response()

    app.add_exception_handler(ApiError, api_error)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(Exception, mistake)
