"""`mallee check`: the faults of a file of settings, or of a whole serve.yaml, a line each.

Ray Serve drops keys that it doesn't know without a word, and tells other faults after the deploy, in a
replica's traceback. Here they are found before.
"""

import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple, get_args

import typer

from mallee.cli.options import JsonOption, require_serve_extra
from mallee.cli.output import print_json
from mallee.cli.serving.fronts import require_front
from mallee.cli.settings import APP_PATH, DEFAULT_MODEL, S, parse_yaml, read_settings
from mallee.protocol.errors import ConfigError, nearest

if TYPE_CHECKING:
    from pydantic import BaseModel

    from mallee.runtime.config import AppConfig

_HUB_ID: Final = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_EVERYWHERE: Final = "0.0.0.0"  # noqa: S104 # Serve's default
DASHBOARD_S: Final = 10.0  # for an answer of Ray's
_OF_SERVE: Final = ("applications", "proxy_location", "http_options", "import_path")
_KEY_VARIABLE: Final = "MALLEE_API_KEY"
_DASHBOARD: Final = "RAY_DASHBOARD_ADDRESS"


class Application(NamedTuple):
    """One of Mallee's applications in a serve.yaml, or the one that a file of settings describes."""

    name: str  # "" of a file of settings
    config: "AppConfig"
    options: dict[str, Any]  # of Serve
    host: str  # that Serve listens on; "" of a file of settings

    def line(self, sentence: str) -> str:
        return f"{self.name}: {sentence}" if self.name else sentence


def check(
    file: Annotated[
        Path,
        typer.Argument(help="serve.yaml, a RayService manifest, or a file for --config."),
    ],
    picker: Annotated[
        bool, typer.Option("--picker", help="It is a file for `mallee picker --config`.")
    ] = False,
    router: Annotated[
        bool, typer.Option("--router", help="It is a file for `mallee router --config`.")
    ] = False,
    files: Annotated[
        bool,
        typer.Option("--files", help="Look on this machine for every file and folder it names."),
    ] = False,
    broker: Annotated[
        bool, typer.Option("--broker", help="Log in at the broker of nats_url, as each role.")
    ] = False,
    running: Annotated[
        bool, typer.Option("--running", help=f"Ask the Ray at {_DASHBOARD} what it would ignore.")
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print faults alone; look for no notes.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Check serve.yaml or a file of settings before it is deployed; exit 1 with a line for each fault.

    Example: mallee check serve.yaml
    """
    if (picker or router) and (files or broker or running or (picker and router)):
        raise ConfigError(
            "--files, --broker and --running look at what `mallee serve` needs: give them without --picker"
            " and --router, and of those one alone"
        )
    if picker or router:
        require_front("picker" if picker else "router", ())
    else:
        require_serve_extra(is_mocked=True)
    values = read_settings(file)
    faults, applications = find_faults(values, is_picker=picker, is_router=router)
    if running and not faults:
        faults += ignored_options(serve_values(values))
    from mallee.actors.foreign.arguments import argument_faults, known_arguments

    for each in applications:
        faults += map(each.line, argument_faults(each.config.engine.vllm, known_arguments()))
        if files:
            from mallee.actors.checks import shortages

            faults += map(each.line, missing_files(each.config))
            faults += map(each.line, shortages(each.config))
        if broker:
            faults += map(each.line, broker_faults(each.config))
    faults = list(dict.fromkeys(faults))  # each once
    noted = () if faults or quiet else applications
    remarks = [each.line(note) for each in noted for note in notes(each)]
    if as_json:
        print_json({"file": str(file), "right": not faults, "faults": faults, "notes": remarks})
    else:
        sys.stderr.writelines(f"{file}: {fault}\n" for fault in faults)
    if faults:
        raise typer.Exit(1)
    if not (as_json or quiet):
        sys.stdout.write(f"{file}: right\n")
        sys.stdout.writelines(f"note: {note}\n" for note in remarks)


def find_faults(
    values: dict[str, Any], *, is_picker: bool = False, is_router: bool = False
) -> tuple[list[str], list[Application]]:
    """The faults of a file's content, and the applications whose settings are right."""
    faults = list[str]()
    if is_picker:
        from mallee.actors.front.picker.config import PickerConfig

        _config(PickerConfig, values, "", faults)
        return faults, []
    if is_router:
        from mallee.actors.front.proxy.config import ProxyConfig

        _config(ProxyConfig, values, "", faults)
        return faults, []
    try:
        values = serve_values(values)
    except ConfigError as error:
        return [str(error)], []
    if any(key in values for key in _OF_SERVE):
        return _serve_faults(values)
    from mallee.runtime.config import AppConfig

    config = _config(AppConfig, {"model": DEFAULT_MODEL, **values}, "", faults)
    return faults, [Application("", config, {}, "")] if config else []


def serve_values(values: dict[str, Any]) -> dict[str, Any]:
    """The serve.yaml of a RayService manifest; else what is given. Raises ConfigError."""
    if values.get("kind") != "RayService":
        return values
    text = (values.get("spec") or {}).get("serveConfigV2")
    if not isinstance(text, str):
        raise ConfigError("a RayService needs spec.serveConfigV2, the text of a serve.yaml")
    return parse_yaml(text, "spec.serveConfigV2")


def _config(schema: type[S], values: object, name: str, faults: list[str]) -> S | None:
    """The settings, or None after adding what is wrong with them to `faults`."""
    from pydantic import ValidationError

    from mallee.runtime.config import problems

    try:
        return schema.model_validate(values)
    except ValidationError as error:
        faults += [f"{name}{key}{sentence}" for key, sentence in problems(error, schema)]
        return None


# serve.yaml


def _serve_faults(values: dict[str, Any]) -> tuple[list[str], list[Application]]:
    require_serve_extra()
    from ray.serve.schema import ServeDeploySchema  # seconds

    from mallee.runtime.config import AppConfig

    if "applications" not in values:
        return ["`applications` is missing: give a list with one entry of import_path and args"], []
    faults = list(_unknown_keys(ServeDeploySchema, values))
    faults += _schema_faults(ServeDeploySchema, values)
    found = values["applications"] if isinstance(values["applications"], list) else []
    given = [each for each in found if isinstance(each, dict)]
    http = values.get("http_options")
    host = str(http.get("host", _EVERYWHERE)) if isinstance(http, dict) else _EVERYWHERE
    ours = list[Application]()
    for options in given:
        path, name = str(options.get("import_path")), str(options.get("name", "default"))
        if path == APP_PATH:
            config = _config(AppConfig, options.get("args") or {}, f"{name}: ", faults)
            if config is not None:
                ours.append(Application(name, config, options, host))
        elif path.startswith("mallee"):
            faults.append(f"{name}: import_path={path!r}: give {APP_PATH}")
    paths = [str(each.get("import_path")) for each in given]
    if given and not any(path.startswith("mallee") for path in paths):
        faults.append(f"no application has import_path: {APP_PATH}; there are {', '.join(paths)}")
    for each in ours:
        faults += map(each.line, _deployment_faults(each))
    faults += _shared_fleets(ours)
    return faults, ours


def _schema_faults(schema: "type[BaseModel]", values: dict[str, Any]) -> Iterator[str]:
    """The faults that Ray Serve's own schema names."""
    from pydantic import ValidationError

    try:
        schema.model_validate(values)
    except ValidationError as error:
        for each in error.errors(include_url=False):
            message = " ".join(each["msg"].removeprefix("Value error, ").split())
            given = each["input"]
            value = f"={given!r}" if isinstance(given, str | int | float | None) else ""
            place = _place(values, each["loc"])
            yield f"{place}{value}: {message}" if place else message


def _place(values: Any, path: Sequence[int | str]) -> str:
    """The dotted key, with the name of each entry of a list in place of its number."""
    parts = list[str]()
    for part in path:
        try:
            values = values[part]
        except (KeyError, IndexError, TypeError):
            values = None  # a key that is missing, or a kind that pydantic tried
        is_named = isinstance(part, int) and isinstance(values, dict) and "name" in values
        parts.append(str(values["name"] if is_named else part))
    return ".".join(parts)


def _unknown_keys(schema: "type[BaseModel]", values: Any, prefix: str = "") -> Iterator[str]:
    """A sentence for each key that Serve would drop."""
    if not isinstance(values, dict):
        return
    for key, value in values.items():
        field = schema.model_fields.get(key)
        if field is None:
            hint = nearest(str(key), schema.model_fields, "Ray Serve would drop it")
            yield f"`{prefix}{key}` is no option of Ray Serve; {hint}"
            continue
        for inner in _models(field.annotation):
            entries = value if isinstance(value, list) else [value]
            for number, each in enumerate(entries):
                name = each.get("name", number) if isinstance(each, dict) else number
                step = f"{prefix}{key}.{name}." if isinstance(value, list) else f"{prefix}{key}."
                yield from _unknown_keys(inner, each, step)


def _models(annotation: Any) -> Iterator["type[BaseModel]"]:
    """The schemas that a field's value may have."""
    from pydantic import BaseModel

    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models(inner)


def _deployment_faults(application: Application) -> Iterator[str]:
    """The faults of `deployments` that Serve, or a replica, would find."""
    config = application.config
    known = ["Gateway", "Worker"] + ["Broker"] * (config.nats_url is None)
    if _KEY_VARIABLE in _variables(application.options):
        yield _shown_key("runtime_env")
    for each in application.options.get("deployments") or ():
        name = str(each.get("name")) if isinstance(each, dict) else ""
        if name == "Broker" and name not in known:
            yield "deployment `Broker`: with nats_url there is none"
        elif name not in known:
            hint = nearest(name, known, f"there are {', '.join(known)}")
            yield f"deployment `{name}` is none of Mallee's; {hint}"
        else:
            yield from (f"{name}: {fault}" for fault in _option_faults(name, each, config))


def _option_faults(name: str, options: dict[str, Any], config: "AppConfig") -> Iterator[str]:
    replicas = options.get("num_replicas")
    ongoing = options.get("max_ongoing_requests")
    if name == "Gateway" and isinstance(ongoing, int) and ongoing < config.http.max_connections:
        yield (
            f"max_ongoing_requests={ongoing} < http.max_connections={config.http.max_connections}: Ray Serve"
            " would hold requests back before a gateway sees them; leave it out, Mallee has 100000"
        )
    if "user_config" in options:
        yield "user_config: no deployment of Mallee takes it; its settings stand in `args`"
    if name == "Broker" and replicas not in (None, 1):
        yield f"num_replicas={replicas!r}: a fleet has one broker; for several give nats_url"
    if replicas == "auto" or options.get("autoscaling_config"):
        remedy = "give autoscaling.max_workers in `args`" if name == "Worker" else "give a number"
        yield f"{'num_replicas' if replicas == 'auto' else 'autoscaling_config'}: {remedy}"
    elif name == "Worker" and replicas is not None and config.autoscaling.max_workers is not None:
        yield f"num_replicas={replicas!r} beside autoscaling.max_workers: leave one of them out"
    actor = options.get("ray_actor_options")
    if isinstance(actor, dict):
        yield from _actor_faults(name, actor, config)


def _actor_faults(name: str, actor: dict[str, Any], config: "AppConfig") -> Iterator[str]:
    """The loss where `ray_actor_options` takes the place of Mallee's own."""
    from mallee.runtime.proxy.direct import ENVIRONMENT

    variables = _variables(actor)
    if _KEY_VARIABLE in variables:
        yield _shown_key("ray_actor_options.runtime_env")
    if name == "Gateway":
        lacking = [key for key, value in ENVIRONMENT.items() if variables.get(key) != value]
        if lacking:
            pairs = ", ".join(f"{key}: {ENVIRONMENT[key]!r}" for key in lacking)
            yield (
                "ray_actor_options take the place of Mallee's, without which requests go the slow way:"
                f" add runtime_env.env_vars {pairs}"
            )
    if name == "Worker" and config.worker_bundles:
        yield (
            "ray_actor_options take the place of Mallee's, by which a worker fits into its placement group:"
            " leave them out; ray.worker_cpus and ray.worker_resources are settings"
        )
    elif name == "Worker" and config.worker_gpus and not actor.get("num_gpus"):
        yield (
            f"ray_actor_options without num_gpus take the place of Mallee's, and engine.device is"
            f" {config.engine.device!r}: add num_gpus: {config.worker_gpus:g}"
        )


def _variables(options: dict[str, Any]) -> dict[str, Any]:
    environment = options.get("runtime_env")
    found = environment.get("env_vars") if isinstance(environment, dict) else None
    return found if isinstance(found, dict) else {}


def _shown_key(place: str) -> str:
    return f"{place}: Ray Serve shows and logs {_KEY_VARIABLE}: give http.keys_file, and change that key"


def _shared_fleets(applications: list[Application]) -> Iterator[str]:
    """Applications whose gateways would take each other's workers for their own."""
    seen = dict[tuple[str | None, str], str]()
    for each in applications:
        if (url := each.config.nats_url) is None:
            continue  # each has a broker of its own
        other = seen.setdefault((url, each.config.fleet), each.name)
        if other != each.name:
            yield f"{each.name}: fleet={each.config.fleet!r} at one broker is {other}'s too"


# The running Ray


def ignored_options(values: dict[str, Any]) -> Iterator[str]:
    """Options that the running Serve has otherwise, and keeps whatever is deployed. Raises ConfigError."""
    if "applications" not in values:
        raise ConfigError(
            "--running compares a serve.yaml or a RayService manifest: give one of them"
        )
    require_serve_extra()
    from ray.dashboard.modules.serve.sdk import ServeSubmissionClient
    from ray.exceptions import RayError
    from ray.serve.schema import ServeDeploySchema

    class Client(ServeSubmissionClient):
        """Waits for no answer for ever."""

        def _do_request(self, *given: Any, **more: Any) -> Any:
            return super()._do_request(*given, timeout=DASHBOARD_S, **more)

    address = os.environ.get(_DASHBOARD, "http://127.0.0.1:8265")  # as of `serve deploy`
    try:
        found = Client(address).get_serve_details()
    except (OSError, RayError, RuntimeError, ValueError) as error:
        cause = str(error).splitlines()[0]
        raise ConfigError(
            f"no Ray lets us in at {_DASHBOARD}={address} ({cause}): give the address of its dashboard, and"
            " RAY_AUTH_MODE and the token of its cluster"
        ) from error
    names = {"proxy_location", "http_options"}
    wanted = ServeDeploySchema.model_validate(values).model_dump(mode="json", include=names)
    if (http := found.get("http_options")) is None:
        return  # no Serve runs there
    pairs = {f"http_options.{key}": (wanted["http_options"].get(key), http[key]) for key in http}
    pairs["proxy_location"] = wanted["proxy_location"], found["proxy_location"]
    for key, (given, kept) in pairs.items():
        if given != kept:
            yield (
                f"{key}={given!r} would be ignored: the Serve that runs has {kept!r} until"
                " `serve shutdown -y`, which ends all requests; then deploy again"
            )


# What the file can't tell


def notes(application: Application) -> Iterator[str]:
    """Remarks on what only the machines can tell."""
    from mallee.actors.checks import shortages
    from mallee.actors.secret import secret_remark
    from mallee.gateway.access.access import LOOPBACK

    host = application.host
    if host and host not in LOOPBACK and application.config.http.keys_file is None:
        yield (
            f"http_options.host={host!r} listens beyond this machine, and without http.keys_file the"
            f" gateways start only where {_KEY_VARIABLE} is in the environment of Ray's nodes"
        )
    config = application.config
    if (remark := secret_remark(config)) is not None:
        yield remark
    has_cuda = config.has_cuda and not config.is_foreign
    if config.engine.vllm and find_spec("vllm") is None:
        yield "vllm is not installed here: names and values in engine.vllm were not checked"
    if has_cuda and config.kv_nbytes is None and config.num_blocks is None:
        yield (
            "engine.kv_gib and engine.kv_tokens are not given: each worker sizes KV by the memory that its"
            " GPU has free when it starts, and logs the sum"
        )
    if has_cuda:
        from mallee.worker.model.installation import look, missing  # imports torch: seconds

        here = f"for engine.device={config.engine.device!r} this machine lacks something"
        yield from (f"{here}: {each}" for each in missing(look()))
    yield from shortages(config)
    if _is_of_hub(application.config.model):
        yield f"model={application.config.model!r} is no folder here: each node fetches it from the hub"


def missing_files(config: "AppConfig") -> Iterator[str]:
    """Files and folders that are not here, or can't be used; a model of the hub is fetched at the start."""
    from mallee.actors.build import check_model, open_access
    from mallee.actors.checks import faults_of, looks
    from mallee.actors.secret import check_secret

    models = [config.model, *filter(None, [config.engine.draft_model])]
    more: list[Callable[[AppConfig], object]] = [open_access, check_secret]
    more += [] if any(map(_is_of_hub, models)) else [check_model]
    yield from faults_of((*looks(config), *(partial(each, config) for each in more)))


def _is_of_hub(model: str) -> bool:
    return not Path(model).expanduser().exists() and _HUB_ID.fullmatch(model) is not None


def broker_faults(config: "AppConfig") -> Iterator[str]:
    """The reason if the broker doesn't take gateways and workers."""
    from mallee.runtime.bus.broker import check_operators_broker

    if config.nats_url is None:
        return
    try:
        check_operators_broker(config)
    except ConfigError as error:
        yield str(error)
