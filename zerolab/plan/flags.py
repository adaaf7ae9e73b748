"""The command line of ``plan``, and what does not go together."""

import argparse

from zerolab import memory, presets
from zerolab.plan.matrices import Matrices
from zerolab.plan.question import Question
from zerolab.step_time import Links

PLACES = ("cpu", "disk")
_TAKE = "take a --model that has them, such as zero-100b"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command; one of --model and --psi is needed, one of --gpu and --gpu-memory too."""
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--model", metavar="NAME", help=f"one of {', '.join(presets.MODELS)}")
    size.add_argument("--psi", metavar="COUNT", help="or a number of parameters, such as 7.5B or 350M")
    parser.add_argument(
        "--gpus", type=int, required=True, metavar="N", help="number of GPUs, one rank on each"
    )
    room = parser.add_mutually_exclusive_group(required=True)
    room.add_argument("--gpu", metavar="NAME", help=f"one of {', '.join(presets.MACHINES)}")
    room.add_argument("--gpu-memory", metavar="SIZE", help="or its memory: 32GB (32e9 bytes) or 32GiB")
    parser.add_argument("--precision", default="mixed", metavar="NAME", help=" | ".join(memory.CONVENTIONS))
    state = parser.add_mutually_exclusive_group()
    optimizers = " | ".join(memory.OPTIMIZER_MOMENTS)
    state.add_argument("--optimizer", default="adam", metavar="NAME", help=optimizers)
    state.add_argument("--k", type=float, metavar="BYTES", help="or bytes of optimizer state per parameter")
    parser.add_argument(
        "--batch", type=int, default=32, metavar="B", help="sequences per GPU and micro-batch"
    )
    parser.add_argument("--seq", type=int, default=1024, metavar="T", help="tokens per sequence")
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations in backward")
    parser.add_argument("--micro-batches", type=int, default=1, metavar="M", help="accumulated in one step")
    _add_residual_arguments(parser.add_argument_group("tensor parallelism and offload"))
    _add_time_arguments(parser.add_argument_group("seconds of a step"))


def _add_residual_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--tensor-parallel", type=int, default=1, metavar="N", help="GPUs that share a copy of the model"
    )
    group.add_argument(
        "--partition-activations", action="store_true", help="they share checkpoints too: the paper's P_a"
    )
    group.add_argument(
        "--cpu-checkpointing", action="store_true", help="keep checkpoints in the host's memory: P_a+cpu"
    )
    places = " | ".join(PLACES)
    group.add_argument("--offload-optimizer", metavar="PLACE", help=f"keep optimizer state there: {places}")


def _add_time_arguments(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--tflops", type=float, metavar="T", help="10^12 FLOPs a second that a GPU sustains; asks for seconds"
    )
    add("--link", metavar="SIZE", help="bytes a second between copies, one direction, such as 12.5GB")
    add("--tensor-parallel-link", metavar="SIZE", help="the same between GPUs of a copy; by default --link")
    add("--offload-link", metavar="SIZE", help="the same to the host's memory or disk")
    add(
        "--latency",
        type=float,
        metavar="SECONDS",
        help=f"of one message; by default {Links.latency_seconds:g}",
    )
    add("--seconds", action="store_true", help="simulate a step of each stage too, with what overlaps")


def read_question(args: argparse.Namespace) -> Question:
    """Return the question that a command line asks, its names looked up and its sizes read."""
    for option in ("gpus", "batch", "seq", "micro_batches", "tensor_parallel"):
        if (value := getattr(args, option)) < 1:
            raise ValueError(f"--{option.replace('_', '-')} is {value}; it must be 1 or more")
    if args.gpu is not None:
        gpu_memory_bytes: float = presets.machine(args.gpu).memory_bytes
    elif (gpu_memory_bytes := memory.parse_bytes(args.gpu_memory)) < 1e6:
        size = f"{args.gpu_memory}, which is {gpu_memory_bytes:g} bytes"
        raise ValueError(f"--gpu-memory is {size}; write its unit, such as 32GB")
    model = _read_model(args)
    _check_residual(args, model)
    if args.seconds:
        _check_simulated(args, model)
    matrices = _read_matrices(args, model)
    cut_by = args.optimizer if matrices is None else "adamw"
    k = memory.optimizer_bytes_per_parameter(cut_by, args.precision) if args.k is None else args.k
    return Question(
        model=model,
        gpus=args.gpus,
        gpu_memory_bytes=gpu_memory_bytes,
        precision=args.precision,
        k=k,
        micro_batches=args.micro_batches,
        batch=args.batch,
        seq=args.seq,
        checkpointing=args.checkpointing or args.partition_activations,
        tensor_parallel=args.tensor_parallel,
        partition_activations=args.partition_activations,
        cpu_checkpointing=args.cpu_checkpointing,
        offload_optimizer=args.offload_optimizer,
        links=_read_links(args),
        matrices=matrices,
    )


def _read_model(args: argparse.Namespace) -> presets.Model:
    if args.model is not None:
        return presets.model(args.model)
    if (psi := memory.parse_count(args.psi)) < 1:
        raise ValueError(f"--psi is {args.psi}; it must be at least 1 parameter, such as 7.5B")
    return presets.Model("a model", psi, None, None, None, None, "--psi")


def _read_matrices(args: argparse.Namespace, model: presets.Model) -> Matrices | None:
    """Return the matrices that Muon updates, or None for an optimizer whose parameters are cut."""
    if args.optimizer != "muon" or args.k is not None:
        return None
    if model.layers is None or model.hidden is None:
        raise ValueError(f"the layers of {model.name} are not known, so neither are its matrices; {_TAKE}")
    if args.tensor_parallel > 1:
        raise ValueError(
            f"--tensor-parallel is {args.tensor_parallel}, and Muon needs whole matrices; leave it out, or "
            "take another --optimizer"
        )
    return Matrices(model.layers, model.hidden, memory.optimizer_bytes_per_parameter("muon", args.precision))


def _check_residual(args: argparse.Namespace, model: presets.Model) -> None:
    """Refuse flags that need another one, and ranks that cannot share the model."""
    if args.offload_optimizer not in (None, *PLACES):
        raise ValueError(f"--offload-optimizer is {args.offload_optimizer}; write {' or '.join(PLACES)}")
    if args.partition_activations and args.tensor_parallel == 1:
        raise ValueError(
            "--partition-activations shares checkpoints among GPUs that have the same ones, and none do; add "
            "--tensor-parallel with 2 or more"
        )
    if args.cpu_checkpointing and not (args.checkpointing or args.partition_activations):
        raise ValueError(
            "--cpu-checkpointing moves checkpoints, and there are none; add --checkpointing, or "
            "--partition-activations where GPUs share a copy"
        )
    if model.layers is None and (args.partition_activations or args.cpu_checkpointing):
        raise ValueError(f"the layers of {model.name} are not known, so neither are its checkpoints; {_TAKE}")
    if model.layers is None and args.tensor_parallel > 1 and args.tflops is not None:
        raise ValueError(f"the layers of {model.name} are not known, so neither are its messages; {_TAKE}")
    if args.gpus % args.tensor_parallel:
        raise ValueError(_indivisible(args.tensor_parallel, "--gpus", args.gpus))
    for name, size in (("attention heads", model.heads), ("width", model.hidden)):
        if size is not None and size % args.tensor_parallel:
            raise ValueError(_indivisible(args.tensor_parallel, f"the {name} of {model.name}", size))


def _check_simulated(args: argparse.Namespace, model: presets.Model) -> None:
    """Refuse what no step is simulated of."""
    if args.tflops is None:
        raise ValueError("--seconds simulates a step; add --tflops, such as --tflops 45")
    if model.layers is None:
        raise ValueError(f"the layers of {model.name} are not known, and --seconds rehearses them; {_TAKE}")
    for option, most in (("gpus", 2**20), ("seq", 2**20), ("batch", 2**20)):
        if (value := getattr(args, option)) > most:
            raise ValueError(f"--{option} is {value}; --seconds simulates up to {most}")
    if args.micro_batches > 1:
        raise ValueError(
            f"--micro-batches is {args.micro_batches}, and --seconds simulates a step of one; leave one out"
        )
    for option in ("offload_optimizer", "cpu_checkpointing"):
        if getattr(args, option):
            flag = f"--{option.replace('_', '-')}"
            raise ValueError(
                f"--seconds simulates nothing that leaves the GPU; leave out {flag} or --seconds"
            )
    if args.optimizer == "muon" and args.k is None:
        raise ValueError(
            "--seconds simulates optimizers whose parameters are cut; leave out --optimizer muon"
        )


def _indivisible(ranks: int, what: str, size: int) -> str:
    return f"--tensor-parallel is {ranks}, which does not divide {what}, {size}; take a divisor of {size}"


def _read_links(args: argparse.Namespace) -> Links | None:
    """Return what seconds are computed from, or None where they are not asked for."""
    if args.tflops is None:
        for option in ("link", "tensor_parallel_link", "offload_link", "latency"):
            if getattr(args, option) is not None:
                flag = f"--{option.replace('_', '-')}"
                raise ValueError(f"{flag} is for the seconds of a step; add --tflops, such as --tflops 45")
        return None
    if not 0 < args.tflops < 1e6:
        raise ValueError(f"--tflops is {args.tflops:g}; it must be above 0 and below 1e6, such as 45")
    latency_seconds = Links.latency_seconds if args.latency is None else args.latency
    if not 0 <= latency_seconds < 1e3:
        raise ValueError(f"--latency is {latency_seconds:g}; it must be from 0 to 1000 seconds, such as 1e-5")
    moves = args.cpu_checkpointing or args.offload_optimizer is not None
    within = args.tensor_parallel_link or args.link
    return Links(
        flops_per_second=args.tflops * 1e12,
        data_parallel=_read_rate("--link", args.link, args.gpus > args.tensor_parallel),
        tensor_parallel=_read_rate("--tensor-parallel-link", within, args.tensor_parallel > 1),
        offload=_read_rate("--offload-link", args.offload_link, moves),
        latency_seconds=latency_seconds,
    )


def _read_rate(flag: str, text: str | None, needed: bool) -> float:
    """Return bytes a second; 1 for a link that nothing is sent on."""
    if text is None:
        if needed:
            raise ValueError(f"--tflops asks for seconds, which need {flag} too; add it, as in {flag} 12.5GB")
        return 1
    if (rate := memory.parse_bytes(text)) < 1e6:
        raise ValueError(f"{flag} is {text}, which is {rate:g} bytes a second; write a unit, as in 12.5GB")
    return rate
