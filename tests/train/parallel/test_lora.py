"""Runs that train adapters beside frozen weights."""

from __future__ import annotations

import math
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import Mesh

from models.checkpoint.saved_checkpoint import find_checkpoint
from models.hugging_face.writing import keep_origin
from tests.models.hugging_face.folders import DATA
from tests.train import compiled_memory
from tests.train.config.test_defaults import saved_run
from train.checkpoint.new_state import init_state
from train.config.config import LoraConfig, MeshSizes
from train.log.log_file import read_log
from train.memory.step_memory import memory_of
from train.optimizer.optimizer import make_optimizer
from train.optimizer.state import FROZEN, state_on_mesh
from train.parallel.batches import abstract_batch
from train.parallel.mesh import make_abstract_mesh, make_mesh
from train.parallel.model import ModelFunctions, Params
from train.run.command_line import main, parse
from train.step import sharded_step

MODEL = shlex.split(
    "--model.num-layers 2 --model.features 32 --model.hidden-features 48 --sequence-length 16"
    " --batch-size 4 --compute-dtype float32 --log-interval 1 --optimizer.warmup-steps 1"
    " --optimizer.learning-rate 0.02 --mesh.tensor 2 --mesh.data 2 --steps 4 --overlap xla"
)
# The default text is that of the Python that runs the tests.
MODEL += ["--data", str(Path(__file__).parents[3] / "LICENSE")]
LORA = shlex.split("--lora.rank 8 --lora.train layers.*norm.scale --lora.dropout 0.1")


def losses(output: str) -> list[str]:
    return re.findall(r"^ +\d+ +(\d+\.\d{4}) ", output, re.MULTILINE)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("adapters")
    saved = ["--checkpoint-dir", str(directory), "--save-interval", "2"]
    main([*MODEL, *LORA, *saved, "--log-file", str(directory / "log.jsonl")])
    return directory


def test_adapters_learn_and_a_resume_is_exact(trained: Path, tmp_path: Path, capsys):
    def curve(log: Path) -> list[float]:
        return [event["loss"] for event in read_log(log) if event["event"] == "step"]

    whole = curve(trained / "log.jsonl")
    assert len(whole) == 4 and whole[-1] < whole[0]
    again, log = tmp_path / "again", tmp_path / "again.jsonl"
    shutil.copytree(trained, again)
    resumed = ["--checkpoint-dir", str(again), "--resume-step", "2", "--log-file", str(log)]
    main([*MODEL, *resumed])  # It keeps its adapters.
    output = capsys.readouterr().out
    assert "changed since" not in output
    (compare,) = re.findall(r"^to compare: \S+ -m train\.compare (.*) --a ", output, re.MULTILINE)
    assert parse(shlex.split(compare)).lora == parse(LORA).lora
    assert curve(log) == whole[2:]
    one, other = (arrays(folder / "step_4") for folder in (trained, again))
    for name in one:
        np.testing.assert_array_equal(one[name], other[name], err_msg=name)


def arrays(path: Path) -> dict[str, np.ndarray]:
    config = parse([*MODEL, *LORA])
    abstract = ModelFunctions(config, MeshSizes(tensor=1)).abstract_params
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    requested = {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=one)
        for name, leaf in abstract.items()
    }
    return jax.tree.map(np.asarray, find_checkpoint(path).restore_params(requested))


def test_a_checkpoint_has_what_is_trained_alone(trained: Path):
    saved = arrays(trained / "step_4")
    ends = {name.rsplit(".", 1)[1] for name in saved}
    assert ends == {"lora_a", "lora_b", "scale"}
    assert all(np.any(a) for name, a in saved.items() if name.endswith("lora_b"))


@pytest.mark.exhaustive
def test_other_weights_are_refused_by_a_resume(trained: Path, capsys: pytest.CaptureFixture[str]):
    arguments = [*MODEL, *LORA, "--checkpoint-dir", str(trained), "--resume", "--steps", "5"]
    base = trained.parent / "base"
    main([*MODEL, "--steps", "1", "--checkpoint-dir", str(base)])
    with pytest.raises(SystemExit):
        main([*arguments, "--init-from", str(base)])
    error = " ".join(capsys.readouterr().err.split())
    assert "other weights than those that the checkpoint's adapters were trained beside" in error


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--lora.rank None", "lora.rank=None, lora.train='': the checkpoint has the"
         " state of a run that trained other parameters; resume with --lora.rank 8, with"
         " --lora.train 'layers.*norm.scale'"),
        ("--lora.rank 4", "lora.rank=4: the checkpoint has"),
        ("--lora.train head.kernel", "lora.train='head.kernel': the checkpoint has"),
        ("--lora.targets q_proj,v_proj", "resume without --lora.targets, or begin"),
        ("--lora.rank None --freeze embedding.*", "resume with --lora.rank 8,"),
    ],
)  # fmt: skip
def test_a_resume_that_trains_other_parameters_says_which_flags_to_give(
    flags: str, sentence: str, trained: Path, capsys: pytest.CaptureFixture[str]
):
    resume = ["--checkpoint-dir", str(trained), "--resume", "--steps", "6"]
    with pytest.raises(SystemExit):
        main([*MODEL, *shlex.split(flags), *resume])
    assert sentence in capsys.readouterr().err


def test_a_resume_names_the_weights_that_the_run_began_with(tmp_path: Path, capsys):
    base = str(DATA / "llama3")
    began = parse(["--init-from", base, "--lora.rank", "4"])
    resume = shlex.split(saved_run(tmp_path, began))
    keep_origin(base, tmp_path)
    for flags, sentence in (
        ([], f"init_from: expected the weights that the run began with, since the"
         f" checkpoint has only what was trained beside them; resume with --init-from {base}, or"),
        (["--lora.rank", "8"],
         f"resume with --lora.rank 4, with --init-from {base}, or begin a new run"),
    ):  # fmt: skip
        with pytest.raises(SystemExit, match=r"^2$"):
            main([*resume, *flags, "--mesh.tensor", "1"])
        assert sentence in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("scan", ["0", "1"])
def test_no_array_has_the_shape_of_a_kernel_gradient(scan: str):
    config = parse([*MODEL, "--lora.rank", "5", "--scan-layers", scan, "--overlap", "ring"])
    sizes = MeshSizes(2, 1, 2)
    model, mesh = ModelFunctions(config, sizes), make_abstract_mesh(sizes, None)
    optimizer = make_optimizer(config.optimizer, config.steps, model.specs)
    state = state_on_mesh(model, optimizer, mesh)
    step = sharded_step(config, model, optimizer, mesh)
    jaxpr = jax.make_jaxpr(step)(state, abstract_batch(config)).jaxpr
    local = {(32, 24), (24, 32), (32, 64), (64, 32)}  # Kernels of features 32, tensor 2.
    made = [e.outvars[0].aval.shape for e in equations(jaxpr) if e.primitive.name == "dot_general"]
    assert made and not local & set(made)
    moments = jax.tree.leaves(state["opt_state"])
    assert len(moments) < 3 * len(model.abstract_params) + 3


@pytest.mark.exhaustive  # Two steps are compiled.
def test_what_is_computed_again_has_the_same_dropout():
    flags = [*MODEL, "--lora.rank", "5", "--lora.dropout", "0.5", "--scan-layers", "1"]
    flags += ["--lora.train", "embedding", "--gradient-accumulation-steps", "2"]
    weights = drawn(flags)
    of_step, computed_again = updates(flags, weights), updates([*flags, "--remat", "full"], weights)
    kept, again, other = of_step(3), computed_again(3), of_step(4)
    for name, gradient in kept.items():
        # B is zero, and so is what its gradient would have passed on to A.
        if not name.endswith("lora_a"):
            assert np.any(gradient != other[name]), name
        np.testing.assert_allclose(gradient, again[name], rtol=1e-5, atol=1e-7, err_msg=name)


DEEP = shlex.split("--lora.rank 8 --remat full --sequence-length 256 --model.num-layers")


def test_remat_bounds_what_blocks_keep_for_adapters():
    """A layer more takes memory for its input, as a loop over layers says, and not for what its
    backward computes again."""

    def activations(layers: str, scan: str) -> int:
        config = parse([*MODEL, *DEEP, layers, "--scan-layers", scan])
        return memory_of(config, make_abstract_mesh(MeshSizes(2, 1, 2), None)).activations

    of_8, expected = (activations("12", scan) - activations("4", scan) for scan in ("0", "1"))
    assert 0 < of_8 < 1.1 * expected


@pytest.mark.exhaustive
@compiled_memory.needs_cuda_build
@pytest.mark.parametrize(("scan", "microbatches"), [(0, 1), (0, 2), (4, 1)])
def test_the_compiler_keeps_no_more_for_adapters_than_is_predicted(scan: int, microbatches: int):
    """Compiles four layers of Llama 3 8B for two H200."""
    changes = {"scan_layers": scan, "gradient_accumulation_steps": microbatches}
    changes |= {"remat": "full", "lora": LoraConfig(rank=16)}
    case = compiled_memory.case(compiled_memory.TENSOR, 4, **changes)
    with compiled_memory.gpus(2) as devices:
        mesh = compiled_memory.mesh_of(devices, compiled_memory.TENSOR)
        step = compiled_memory.compiled_step(case.config, mesh)
    assert step.total < 1.03 * step.predicted.total


SHARDED = ["--lora.rank", "6", "--lora.train", "head.kernel", "--mesh.fsdp", "2"]
#: A model whose kernels layers multiply in 8 bits.
WIDE = shlex.split(
    "--model.features 256 --model.hidden-features 512 --model.num-heads 8 --model.head-dim 32"
    " --model.num-key-value-heads 8"
)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("flags", "zero"),
    [
        (("--scan-layers", "1", "--remat", "full"), ["--zero", "1"]),
        (("--gradient-accumulation-steps", "2", "--lora.dropout", "0.5"), ["--zero", "3"]),
        ((*WIDE, "--lora.base-format", "blockwise", "--scan-layers", "2"), ["--zero", "3"]),
    ],
    ids=str,
)
def test_shards_are_updated_like_the_whole(flags: tuple[str, ...], zero: list[str]):
    arguments = [*MODEL, *SHARDED, *flags, "--batch-size", "8"]
    none = ["--zero", "0"]
    weights = drawn([*arguments, *none])
    whole, sharded = (updates([*arguments, *level], weights)(3) for level in (none, zero))
    assert whole.keys() == sharded.keys()
    for name, update in whole.items():
        # Sums in another order, of numbers that 8 bits round the other way now and then.
        close = 2e-2 if WIDE[0] in flags else 1e-4
        error = np.linalg.norm(sharded[name] - update)
        assert error <= close * np.linalg.norm(update) + 1e-7, name


@pytest.mark.parametrize(("zero", "frozen"), [(1, 0), (3, 14)])
def test_zero_shards_adapters_and_with_level_3_frozen_kernels(zero: int, frozen: int):
    config = parse([*MODEL, *SHARDED, "--zero", str(zero), "--overlap", "auto"])
    model = ModelFunctions(config, MeshSizes(2, 2, 2))
    optimizer = make_optimizer(config.optimizer, config.steps, model.specs)
    state = state_on_mesh(model, optimizer, make_abstract_mesh(MeshSizes(2, 2, 2), None))

    def sharded(tree: object) -> list[str]:
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        names = [jax.tree_util.keystr(p) for p, leaf in leaves if "fsdp" in str(leaf.sharding.spec)]
        return [name for name in names if name.endswith(("lora_a']", "lora_b']", "kernel']"))]

    # Seven kernels in each of two layers, and a head, which is trained; each with two moments.
    assert len(sharded(state["params"])) == 29
    assert len(sharded(state["opt_state"])) == 58
    assert len(sharded(state["frozen"])) == frozen


def setting(flags: list[str]) -> tuple[ModelFunctions, optax.GradientTransformation, Mesh]:
    """The model, gradient descent and the mesh of a run."""
    config = parse(flags)
    sizes = MeshSizes(config.mesh.data, config.mesh.fsdp or 1, config.mesh.tensor)
    return ModelFunctions(config, sizes), optax.sgd(1.0), make_mesh(sizes)


def drawn(flags: list[str]) -> Params:
    """The random weights of a run. XLA compiles them as long as it compiles a step."""
    state = init_state(*setting(flags))
    return jax.device_get(state["params"] | state[FROZEN])


def updates(flags: list[str], weights: Params) -> Callable[[int], dict[str, np.ndarray]]:
    """The updates by gradient descent of a batch, the same in each step, by number of the step."""
    config, (model, optimizer, mesh) = parse(flags), setting(flags)
    state = init_state(model, optimizer, mesh, weights)
    before = jax.tree.map(np.asarray, state["params"])
    tokens = jax.random.randint(jax.random.key(0), (config.batch_size, 16), 0, 256)
    batch = {"inputs": tokens, "targets": tokens}
    step = jax.jit(sharded_step(config, model, optimizer, mesh))

    def of_step(number: int) -> dict[str, np.ndarray]:
        after, _ = step({**state, "step": state["step"] + number}, batch)
        return {name: before[name] - after["params"][name] for name in before}

    return of_step


def equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--lora.rank 4 --freeze embedding", "freeze='embedding': not with lora.rank=4"),
        # These apply blocks without tying gradients, as those of adapters have to be.
        ("--lora.rank 4 --overlap rewrite-jit", "overlap='rewrite-jit': not with lora.rank=4: the"),
        ("--lora.rank 4 --overlap rewrite", "overlap='rewrite': not with lora.rank=4: the plain"),
        (
            "--lora.rank 4 --zero 3 --mesh.fsdp 2 --mesh.data 1 --weight-gather blocks",
            "zero=3: frozen weights are gathered by the matmuls that use them, and --weight-gather",
        ),
        ("--lora.rank 4 --lora.targets q_projection", "lora.targets='q_projection'"),
        ("--lora.rank 4 --lora.train nothing.*", "lora.train='nothing.*': matches no parameter"),
        ("--freeze *", "freeze='*': matches all parameters"),
        ("--freeze * --dry-run --mesh.tensor 0", "freeze='*': matches all parameters"),
        ("--lora.rank 4 --lora.train layers.feed_forward.up.kernel", "train all of its kernels"),
    ],
)
def test_flags_that_do_not_fit_are_refused(
    flags: str, reason: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit):
        main([*MODEL, *flags.split()])
    assert reason in " ".join(capsys.readouterr().err.split())


@pytest.mark.exhaustive
def test_adapters_learn_beside_kernels_in_8_bits(tmp_path: Path, capsys):
    base = ["--lora.base-format", "rowwise", "--scan-layers", "1", "--remat", "full"]
    arguments = [*MODEL, *LORA, *base, "--checkpoint-dir", str(tmp_path), "--save-interval", "2"]
    main(arguments)
    whole = losses(capsys.readouterr().out)
    assert float(whole[-1]) < float(whole[0])
    main([*arguments, "--resume-step", "2"])
    assert losses(capsys.readouterr().out) == whole[2:]


@pytest.mark.exhaustive
def test_the_evaluation_of_a_checkpoint_is_that_of_its_run(tmp_path: Path, capsys):
    held_out = tmp_path / "held_out.txt"
    held_out.write_text("Some text that was held out. " * 8)
    run = ["--checkpoint-dir", str(tmp_path / "run"), "--eval-data", str(held_out)]
    main([*MODEL, *LORA, *run, "--steps", "2"])
    of_run = capsys.readouterr().out
    # The adapters, and what else is trained, are those of the checkpoint.
    arguments = [*MODEL, *run, "--eval-only"]
    main(arguments)
    pattern = r"held-out loss (\S+), perplexity"
    assert re.findall(pattern, capsys.readouterr().out) == re.findall(pattern, of_run)[-1:]
    for flags, reason in (
        (["--seed", "1"], "other weights than those that the checkpoint's adapters"),
        (["--lora.rank", "3"], "the checkpoint was trained with LoraConfig(rank=8"),
    ):
        with pytest.raises(SystemExit):
            main([*arguments, *flags])
        assert reason in " ".join(capsys.readouterr().err.split())


def test_what_is_frozen_by_name_does_not_change(tmp_path: Path, capsys):
    main([*MODEL, "--freeze", "embedding,layers.attention.*", "--checkpoint-dir", str(tmp_path)])
    output = capsys.readouterr().out
    assert "others are frozen, and MFU does not count gradients for them" in output
    numbers = losses(output)
    assert float(numbers[-1]) < float(numbers[0])


def test_flops_count_no_gradients_of_frozen_kernels():
    def counted(*flags: str) -> tuple[ModelFunctions, int]:
        functions = ModelFunctions(parse([*MODEL, *flags]))
        return functions, functions.flops_per_token(8)

    functions, whole = counted()
    shapes = functions.abstract_params
    kernels = [shapes[n].shape for n in functions.matrices - {"embedding"}]
    weights = sum(map(math.prod, kernels))
    adapted, adapters = counted("--lora.rank", "2")
    assert adapters == whole - 2 * weights + 6 * adapted.trained_count
    assert counted("--freeze", "head.kernel")[1] == whole - 2 * math.prod(
        shapes["head.kernel"].shape
    )
    assert counted("--freeze", "embedding")[1] == whole
