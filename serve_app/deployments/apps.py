"""The app builders that `deployments.yaml` names; each takes its `args:` as one validated object.

Ray Serve validates `args:` by the parameter's annotation, which must be the class itself: no `annotations` from
`__future__` in this file.
"""

from ray import serve
from ray.serve import Application, Deployment

from serve_app.deployments.model_server import ModelServer
from serve_app.deployments.triton_server import TritonServer
from serve_app.settings import ModelServerArgs, TritonServerArgs

# Requests under way in one replica that Ray Serve lets in. High, because the bounds that count are per model
# (`queue` in the settings): Serve's own would make all models wait for the slowest, and would cap batches.
_MAX_ONGOING_REQUESTS = 8192


def model_server(args: ModelServerArgs) -> Application:
    """The front: ModelServer replicas, to be routed at `/` (or at `/v2/models/<name>` for one model's own app)."""
    # The plain class is wrapped here, so that replicas import its module instead of unpickling a copy of it.
    deployment: Deployment = serve.deployment(  # type: ignore[assignment]  # its stub lacks this form
        serve.ingress()(ModelServer),
        name="ModelServer",
        max_ongoing_requests=_MAX_ONGOING_REQUESTS,
        health_check_period_s=5,
        ray_actor_options={"num_cpus": 1},
    )
    return deployment.bind(args.model_dump(mode="json"))


def triton_fleet(args: TritonServerArgs) -> Application:
    """The fleet: TritonServer replicas, not routed (`route_prefix: null`)."""
    deployment: Deployment = serve.deployment(  # type: ignore[assignment]  # as above
        TritonServer,
        name="TritonServer",
        num_replicas=args.num_replicas,
        health_check_period_s=2,
        health_check_timeout_s=10,
        # Draining, the server's own bound, two seconds more until SIGKILL, five to reap; and room for Ray.
        graceful_shutdown_timeout_s=args.drain_s + args.stop_timeout_s + 15,
        ray_actor_options={"num_cpus": args.num_cpus, "num_gpus": args.num_gpus},
    )
    return deployment.bind(args.model_dump(mode="json"))
