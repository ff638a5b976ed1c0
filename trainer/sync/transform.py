"""The exchange as an optax transformation, for use inside ``shard_map`` and ``pmap``."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.typing import DTypeLike

from trainer.config import CompressName
from trainer.errors import SettingsRefused
from trainer.sync import buckets, coded, collectives, compression, overlap
from trainer.sync.choice import Links, choose
from trainer.sync.codecs.base import Codec
from trainer.sync.compression import Compression
from trainer.sync.cost import Profile
from trainer.sync.error_feedback import zero_unless
from trainer.sync.levels import Topology, divide, topology
from trainer.sync.settings import Settings, check, check_leaves, check_sizes, sizes_here, sizes_in
from trainer.sync.state import SyncState


def all_reduce(
    mesh: Mesh | None = None,
    *,
    algorithm: str = "auto",
    across: str = "auto",
    axes: str | Sequence[str] = ("node", "local"),
    devices_per_node: int | None = None,
    bucket_mib: float | Literal["auto"] = "auto",
    reduce: Literal["mean", "sum"] = "mean",
    output_dtype: DTypeLike | None = None,
    profile: Profile | None = None,
    num_hosts: int | None = None,
    codec: str | Codec = "none",
    codec_args: Mapping[str, Any] | None = None,
    compress: CompressName = "slow",
    error_feedback: bool = False,
    warmup_steps: int = 0,
    momentum_correction: float = 0.0,
    seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
    """Replaces each replica's updates by their mean, or their sum, over all replicas: identical bits on every one.

    It is summed in float32, which is also what is on the wire, and returned in each leaf's own dtype, or in
    ``output_dtype``. Leaves are floating-point, of any shape, the empty ones too. To be called inside
    ``jax.shard_map(..., check_vma=False)``, or inside ``jax.pmap`` with ``axes`` the one name that it maps over.
    ``init`` can be called anywhere, though with a codec only the mesh can tell it how many owners there are outside of
    the mapped function: there its state has a row for each, inside (and without a mesh only there) the owner's alone.

    Between processes on CPUs nothing can be used before all is exchanged, so that the exchange can run beside the
    backward pass (see overlap.py).

    With a codec, what crosses the slow link is encoded, and a replica's updates that are not finite make all results
    NaN and leave the state as it was. Leaves that the codec does not apply to are exchanged exactly.

    ``update`` takes ``mask``, a tree of bools like the updates and the same on all replicas: where it is False the
    result is zero and nothing is kept back, which no codec that sends every element could promise.

    Args:
        mesh: the mesh of the surrounding ``shard_map``. Without it the arguments that need it are checked when the
            loop is traced, and no earlier.
        algorithm: "xla", "ring", "tree", "hierarchical", "central" (see collectives.py), or "auto" (see choice.py).
        across: how "hierarchical" goes across nodes: "ring", "tree", "xla" or "auto".
        axes: the mapped axes to reduce over. The last of several counts a node's devices.
        devices_per_node: with a single axis: how many neighbouring replicas share a node.
        bucket_mib: leaves are exchanged together in buckets of about this size; a leaf of half of it goes alone.
        reduce: "mean" for a loop whose replicas hold means over equally many examples; "sum" for contributions, which
            are already divided by the global weight.
        output_dtype: the dtype of the result.
        profile: measured links, from which "auto" predicts what is quickest.
        num_hosts: how many machines the processes are on, for "auto"; None: not known.
        codec: "none", a name in ``codecs.CODECS``, or a codec of your own.
        codec_args: keywords for a codec that is given by its name.
        compress: "slow": only the exchange across nodes, after an exact one within them; "all": everywhere.
        error_feedback: whether each owner (a node, or a replica with "all") keeps what the codec dropped, and adds it
            to the next updates: float32 of the parameters' size for each owner.
        warmup_steps: updates that are exchanged exactly, before the codec is used.
        momentum_correction: momentum that each owner applies before anything is dropped, in place of the optimizer's.
        seed: of the random numbers that codecs draw; the same on all replicas.

    Raises:
        SettingsRefused: an argument that cannot be; a topology on which the algorithm cannot work. What only the
            surrounding loop can tell is refused, likewise in one line, when it is traced: before anything compiles.

    >>> mesh = jax.make_mesh((2, 4), ("node", "local"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    >>> sync = all_reduce(mesh, algorithm="hierarchical")
    >>> def step(gradient):
    ...     return sync.update(gradient, sync.init(gradient))[0]
    >>> spec = jax.P(("node", "local"))
    >>> step = jax.shard_map(step, mesh=mesh, in_specs=spec, out_specs=jax.P(), check_vma=False)
    >>> print(step(jnp.arange(8.0)))
    [3.5]

    >>> sync = all_reduce(axes="replica", devices_per_node=4, algorithm="ring", reduce="sum")
    >>> print(jax.pmap(lambda x: sync.update(x, sync.init(x))[0], axis_name="replica")(jnp.arange(8.0)))
    [28. 28. 28. 28. 28. 28. 28. 28.]
    """
    names = (axes,) if isinstance(axes, str) else tuple(axes)
    chosen = compression.choose(
        codec,
        codec_args or {},
        compress=compress,
        error_feedback=error_feedback,
        warmup_steps=warmup_steps,
        momentum_correction=momentum_correction,
        seed=seed,
    )
    settings = Settings(
        algorithm, across, names, devices_per_node, bucket_mib, reduce, output_dtype, profile, num_hosts, chosen
    )
    check(settings)
    if mesh is not None:
        check_sizes(settings, sizes_in(mesh, names))

    def init(params: optax.Params) -> SyncState:
        if chosen is None:
            return SyncState()
        return compression.initial(chosen, params, _owners_here(settings, chosen, mesh))

    def update(updates: Any, state: Any, params: Any = None, *, mask: Any = None, **others: Any) -> tuple[Any, Any]:
        del params, others
        if chosen is not None:
            return _exchange_coded(settings, chosen, mesh, updates, state, mask)
        done = _exchange(settings, mesh, updates)
        return (done if mask is None else jax.tree.map(zero_unless, mask, done)), state

    return optax.GradientTransformationExtraArgs(init, update)


def _exchange(settings: Settings, mesh: Mesh | None, updates: Any) -> Any:
    leaves, structure = jax.tree.flatten(updates)
    sizes = sizes_here(settings, mesh)
    check_sizes(settings, sizes)
    check_leaves(updates)
    num_replicas, dtype = math.prod(sizes), settings.output_dtype
    summed = _sum(settings, mesh, sizes, leaves) if num_replicas > 1 else leaves

    def finish(total: jax.Array, given: jax.Array) -> jax.Array:
        value = total / num_replicas if settings.reduce == "mean" and num_replicas > 1 else total
        return value.astype(given.dtype if dtype is None else dtype)

    return structure.unflatten([finish(total, given) for total, given in zip(summed, leaves, strict=True)])


def _exchange_coded(
    settings: Settings, how: Compression, mesh: Mesh | None, updates: Any, state: Any, mask: Any
) -> tuple[Any, SyncState]:
    sizes = sizes_here(settings, mesh)
    check_sizes(settings, sizes)
    check_leaves(updates)
    levels = _levels(settings, sizes, _links(settings, mesh, sizes))
    divisor = math.prod(sizes) if settings.reduce == "mean" else 1
    contributions = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), updates)
    algorithm, bucket_bytes = how.summing(settings.algorithm, settings.across), how.bucket_bytes(settings.bucket_mib)
    totals, state = coded.exchange(how, levels, algorithm, bucket_bytes, contributions, state, mask, divisor)
    leaves, structure = jax.tree.flatten(updates)
    dtype = settings.output_dtype
    done = [total.astype(given.dtype if dtype is None else dtype) for total, given in zip(totals, leaves, strict=True)]
    return structure.unflatten(done), state


def _sum(
    settings: Settings, mesh: Mesh | None, sizes: Sequence[int], leaves: Sequence[jax.Array]
) -> Sequence[jax.Array]:
    """The float32 sums of the leaves over all replicas, bucket by bucket."""
    links = _links(settings, mesh, sizes)
    choice = choose(
        list(leaves),
        links,
        algorithm=settings.algorithm,
        across=settings.across,
        bucket_mib=settings.bucket_mib,
        profile=settings.profile,
    )
    levels = _levels(settings, sizes, links)
    sums = [leaf.astype(jnp.float32) for leaf in leaves]
    plan, total = buckets.plan([leaf.shape for leaf in leaves], choice.bucket_mib * 2**20), None
    for bucket in plan:
        vector = buckets.pack([leaves[index] for index in bucket], links.is_emulated)
        if links.blocks_threads and len(bucket) == 1:  # several were copied into one
            vector = overlap.behind_products(vector)
        total = collectives.all_reduce(vector, levels, choice.algorithm, choice.across)
        shapes = [leaves[index].shape for index in bucket]
        for index, leaf in zip(bucket, buckets.unpack(total, shapes, links.is_emulated), strict=True):
            sums[index] = leaf
    return sums if total is None or not links.blocks_threads else overlap.all_at_once(sums, total)


def _owners_here(settings: Settings, how: Compression, mesh: Mesh | None) -> int:
    """How many owners' rows ``init`` makes: one where the axes are mapped, elsewhere all."""
    try:
        jax.lax.axis_size(settings.axes)
        return 1
    except NameError:
        if mesh is None:
            raise SettingsRefused(
                "without a mesh, the exchange's init cannot know how many owners of residuals there are: call it "
                "inside the jax.pmap or jax.shard_map, or give all_reduce the mesh"
            ) from None
    sizes = sizes_in(mesh, settings.axes)
    return divide(sizes, settings.devices_per_node)[0] if how.compress == "slow" else math.prod(sizes)


def _links(settings: Settings, mesh: Mesh | None, sizes: Sequence[int]) -> Links:
    nodes, local = divide(sizes, settings.devices_per_node)
    if isinstance(mesh, Mesh):
        devices = mesh.devices.flat
        num_processes, platform = len({device.process_index for device in devices}), devices[0].platform
    else:
        num_processes, platform = jax.process_count(), jax.default_backend()
    return Links(nodes, local, num_processes, platform, settings.num_hosts)


def _levels(settings: Settings, sizes: Sequence[int], links: Links) -> Topology:
    axes, local = settings.axes, settings.devices_per_node
    return topology(axes, sizes, local, links.platform, takes_turns=links.blocks_threads)
