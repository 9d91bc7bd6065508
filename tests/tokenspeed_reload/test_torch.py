"""What PyTorch makes of functions and classes: modules, autograd functions, custom operators, compiled code."""

from __future__ import annotations

import gc
import warnings

import pytest

from tokenspeed_reload import ReloadError
from tokenspeed_reload.undo import UndoLog

torch = pytest.importorskip("torch")

MODEL = """
import torch

def scale(x): return x * {0}

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.kept = self.forward
        self.table = {{"forward": self.forward}}
    def forward(self, x):
        return scale(x) * self.weight + {1}
    @property
    def size(self): return {0}
"""


@pytest.fixture
def load(project):
    def load(name: str, text: str):
        project.write_module(name, text)
        project.watch(name)
        return project.load(name)

    return load


def one(value=1.0):
    return torch.full((2,), value)


def test_a_live_module_runs_the_new_forward_and_keeps_parameters_hooks_and_bound_methods(project, load):
    m = load("m", MODEL.format(1, 0))
    block = m.Block()
    model = torch.nn.Sequential(block)
    calls = []
    block.register_forward_hook(lambda *args: calls.append(1))
    storage, weight = block.weight.data_ptr(), block.weight
    project.write_module("m", MODEL.format(3, 10) + "    def more(self): return self.size\n")
    transaction = project.reloader.reload()
    for function in (model, block, block.kept, block.table["forward"]):
        assert function(one()).tolist() == [13.0, 13.0]
    assert (block.size, block.more(), len(calls)) == (3, 3, 2)
    assert block.weight is weight and block.weight.data_ptr() == storage
    transaction.undo()
    for function in (model, block, block.kept, block.table["forward"]):
        assert function(one()).tolist() == [1.0, 1.0]
    assert not hasattr(block, "more")


def test_a_module_class_gets_a_base_and_super(project, load):
    text = "import torch\nclass Mixin:\n    def extra(self): return 5\n"
    text += "class A(torch.nn.Module):\n    def forward(self, x): return x\n"
    m = load("m", text)
    a = m.A()
    new = text.replace("(torch.nn.Module)", "(Mixin, torch.nn.Module)").replace(
        "return x", "return super().extra() + x"
    )
    project.write_module("m", new)
    transaction = project.reloader.reload()
    assert a(one()).tolist() == [6.0, 6.0]
    transaction.undo()
    assert a(one()).tolist() == [1.0, 1.0]


FUNCTION = """
import torch
class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * {0}
    @staticmethod
    def backward(ctx, grad):
        return grad * {1}
"""


def test_an_autograd_function_follows_forwards_and_backwards(project, load):
    m = load("m", FUNCTION.format(2, 2))
    apply, cls = m.Scale.apply, m.Scale

    def run():
        x = one().requires_grad_()
        y = apply(x)
        y.sum().backward()
        return y[0].item(), x.grad[0].item()

    assert run() == (2, 2)
    project.write_module("m", FUNCTION.format(3, 5))
    transaction = project.reloader.reload()
    assert run() == (3, 5) and m.Scale is cls
    transaction.swap()
    assert run() == (2, 2)
    transaction.commit()
    assert run() == (3, 5)
    split = (
        FUNCTION.format(4, 7).replace("forward(ctx, x)", "forward(x)").replace("        ctx.save_for_backward(x)\n", "")
    )
    project.write_module("m", split + "    @staticmethod\n    def setup_context(ctx, inputs, output): pass\n")
    project.reload()
    assert run() == (4, 7)


OPERATOR = """
import torch

@torch.library.custom_op("{ns}::scale", mutates_args=())
def scale(x: torch.Tensor) -> torch.Tensor:
    return x * {0}

@scale.register_fake
def _(x):
    return torch.empty_like(x)

def backward(ctx, grad):
    return grad * {1}

scale.register_autograd(backward)
"""


def test_a_custom_operator_of_the_same_schema_follows_without_a_second_registration(project, load):
    m = load("m", OPERATOR.format(2, 3, ns="reload_a"))
    held, overload, packet = m.scale, torch.ops.reload_a.scale.default, torch.ops.reload_a.scale
    library = held._lib

    def run():
        results = {f(one())[0].item() for f in (held, overload, packet, m.scale)}
        x = one().requires_grad_()
        held(x).sum().backward()
        return results, x.grad[0].item()

    assert run() == ({2.0}, 3.0)
    project.write_module("m", OPERATOR.format(5, 7, ns="reload_a"))
    transaction = project.reloader.reload()
    assert run() == ({5.0}, 7.0)
    assert m.scale is held and held._lib is library and library.m is not None
    assert torch.ops.reload_a.scale.default is overload
    assert transaction.report.stale == [] and transaction.report.effects == []
    for _ in range(3):
        transaction.swap()
        assert run() == ({2.0}, 3.0)
        transaction.swap()
        assert run() == ({5.0}, 7.0)
    transaction.undo()
    assert run() == ({2.0}, 3.0)
    project.write_module("m", OPERATOR.format(2, 9, ns="reload_a"))
    project.reload()
    assert run() == ({2.0}, 9.0)


def test_an_edited_fake_implementation_is_used_and_undone(project, load):
    m = load("m", OPERATOR.format(2, 3, ns="reload_b"))
    fake = m.scale._abstract_fn
    project.write_module("m", OPERATOR.format(2, 3, ns="reload_b").replace("empty_like(x)", "empty_like(x).double()"))
    transaction = project.reloader.reload()
    assert m.scale(torch.empty(2, device="meta")).dtype is torch.float64
    transaction.undo()
    assert m.scale(torch.empty(2, device="meta")).dtype is torch.float32 and m.scale._abstract_fn is fake


def test_another_schema_is_reported_and_the_old_operator_works_on(project, load):
    text = OPERATOR.format(2, 3, ns="reload_c").split("@scale.register_fake")[0]
    m = load("m", text)
    held = m.scale
    project.write_module("m", text.replace("(x: torch.Tensor)", "(x: torch.Tensor, by: int)").replace("2", "by"))
    report = project.reload()
    assert [n.what for n in report.needs_restart] == ["m.scale"]
    assert held(one()).tolist() == [2.0, 2.0] and m.scale is held
    project.write_module("m", text.replace("* 2", "* 4"))
    assert project.reload().needs_restart == []
    assert held(one()).tolist() == [4.0, 4.0]


def test_a_new_operator_is_withdrawn_by_an_undo(project, load):
    load("m", "import torch\n")
    project.write_module("m", OPERATOR.format(2, 3, ns="reload_d"))
    transaction = project.reloader.reload()
    assert torch.ops.reload_d.scale(one()).tolist() == [2.0, 2.0]
    transaction.swap()
    assert not hasattr(torch.ops.reload_d, "scale")
    transaction.swap()
    assert torch.ops.reload_d.scale(one()).tolist() == [2.0, 2.0]
    transaction.undo()
    assert not hasattr(torch.ops.reload_d, "scale")
    project.write_module("m", OPERATOR.format(4, 3, ns="reload_d"))
    project.reload()
    assert torch.ops.reload_d.scale(one()).tolist() == [4.0, 4.0]


def test_a_failure_after_an_operator_ran_again_leaves_it_as_it_was(project, load):
    m = load("m", OPERATOR.format(2, 3, ns="reload_e"))
    init = torch._library.custom_ops.CustomOpDef.__init__
    state = dict(vars(m.scale))
    project.write_module("m", OPERATOR.format(5, 7, ns="reload_e") + "\nX = 1 / 0\n")
    with pytest.raises(ReloadError):
        project.reloader.reload()
    assert torch._library.custom_ops.CustomOpDef.__init__ is init
    assert all(vars(m.scale)[name] is value for name, value in state.items())
    assert torch.ops.reload_e.scale(one()).tolist() == [2.0, 2.0]


LIBRARY = """
import torch
lib = torch.library.Library("{ns}", "DEF")
lib.define("scale(Tensor x) -> Tensor")

@torch.library.impl(lib, "scale", "CPU")
def scale_cpu(x):
    return x * {0}

@torch.library.register_fake("{ns}::scale")
def _(x):
    return torch.empty_like(x)
"""


@pytest.mark.parametrize("extra", ["", "# moved\n\n", "UNRELATED = 1\n"])
def test_operators_of_a_library_follow(project, load, extra):
    ns = f"reload_lib{len(extra)}"
    m = load("m", LIBRARY.format(2, ns=ns))
    overload, library = getattr(torch.ops, ns).scale.default, m.lib
    project.write_module("m", extra + LIBRARY.format(5, ns=ns))
    transaction = project.reloader.reload()
    assert overload(one()).tolist() == [5.0, 5.0] and m.lib is library
    transaction.undo()
    assert overload(one()).tolist() == [2.0, 2.0]
    gc.collect()
    # The whole library is built again when one of its definitions changes.
    project.write_module("m", LIBRARY.format(7, ns=ns) + 'lib.define("more(Tensor x) -> Tensor")\n')
    report = project.reload()
    gc.collect()
    assert overload(one()).tolist() == [7.0, 7.0] and m.lib is library
    assert any(f"{ns}::more" in effect.what for effect in report.effects)


def test_a_library_operator_of_another_schema_is_reported(project, load):
    m = load("m", LIBRARY.format(2, ns="reload_other"))
    project.write_module("m", LIBRARY.format(2, ns="reload_other").replace("(Tensor x)", "(Tensor x, int by)"))
    report = project.reload()
    assert [n.what for n in report.needs_restart] == ["reload_other::scale"]
    assert torch.ops.reload_other.scale(one()).tolist() == [2.0, 2.0]
    assert m.lib.m is not None


def test_compiled_functions_and_modules_are_never_stale(project, load):
    m = load("m", MODEL.format(2, 0))
    block = m.Block()
    compiled = torch.compile(block, backend="eager")
    function = torch.compile(m.scale, backend="eager")
    model = torch.nn.Sequential(m.Block(), torch.nn.Identity())
    outer = torch.compile(model, backend="eager")

    def run():
        with torch.no_grad():
            return compiled(one())[0].item(), function(one())[0].item(), outer(one())[0].item()

    assert run() == (2, 2, 2)
    project.write_module("m", MODEL.format(3, 10))
    transaction = project.reloader.reload()
    assert run() == (13, 3, 13)
    transaction.swap()
    assert run() == (2, 2, 2)
    transaction.swap()
    assert run() == (13, 3, 13)
    transaction.undo()
    assert run() == (2, 2, 2)
    gc.collect()  # what dynamo left in the module goes without an error
    torch._dynamo.reset()


def test_what_torchscript_compiled_from_edited_code_is_reported(project, load):
    text = "import torch\ndef inner(x: torch.Tensor): return x * {0}\n"
    text += "@torch.jit.script\ndef outer(x: torch.Tensor): return inner(x)\n"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        m = load("m", text.format(2))
        held = [m.outer]
        project.write_module("m", text.format(3))
        report = project.reload()
        assert [s.definition for s in report.stale] == ["m.outer"] and held[0](one())[0].item() == 2
        project.write_module("m", text.format(3).replace("inner(x)", "inner(x) + 1"))
        report = project.reload()
    assert m.outer(one())[0].item() == 4 and held[0](one())[0].item() == 2
    assert [s.definition for s in report.stale] == ["m.outer"]


def test_an_operator_of_triton_kernels_follows(project, load):
    text = OPERATOR.format(2, 3, ns="reload_t").replace("custom_op", "triton_op")
    m = load("m", text)
    held = m.scale
    project.write_module("m", text.replace("* 2", "* 5"))
    transaction = project.reloader.reload()
    assert held(one())[0].item() == torch.ops.reload_t.scale(one())[0].item() == 5
    transaction.undo()
    assert held(one())[0].item() == torch.ops.reload_t.scale(one())[0].item() == 2


def test_a_model_survives_a_hundred_swaps(project, load):
    m = load("m", MODEL.format(1, 0))
    block = m.Block()
    project.write_module("m", MODEL.format(3, 10))
    transaction = project.reloader.reload()
    for _ in range(100):
        assert block(one())[0].item() == 13
        transaction.swap()
        assert block(one())[0].item() == 1
        transaction.swap()
    transaction.commit()


DECORATED = """
import torch

@torch.compile(backend="eager")
def compiled(x): return x * {0}

@torch.inference_mode()
def inferred(x): return x * {0}

class Block(torch.nn.Module):
    @torch.compile(backend="eager")
    def forward(self, x): return x * {0}
    @torch.no_grad()
    def method(self, x): return x * {0}
"""


def test_functions_behind_decorators_of_torch_follow(project, load):
    m = load("m", DECORATED.format(2))
    block = m.Block()
    held = (m.compiled, m.inferred, block, block.method)

    def run():
        return {function(one())[0].item() for function in (*held, m.compiled, m.inferred)}

    assert run() == {2}
    project.write_module("m", DECORATED.format(3))
    transaction = project.reloader.reload()
    assert run() == {3} and transaction.report.stale == []
    transaction.undo()
    assert run() == {2}


def test_an_operator_gets_a_kernel_for_another_device(project, load):
    text = OPERATOR.format(2, 3, ns="reload_dev").replace("mutates_args=()", "mutates_args=(), device_types='cpu'")
    m = load("m", text)
    added = '@scale.register_kernel("cuda")\ndef _(x):\n    return x * 7\n'
    project.write_module("m", text.replace("x * 2", "x * 5") + added)
    report = project.reload()
    assert m.scale(one())[0].item() == 5
    assert torch._C._dispatch_has_kernel_for_dispatch_key("reload_dev::scale", "CUDA")
    assert [effect.what for effect in report.effects] == [
        "It registered reload_dev::scale for cuda, which stays registered."
    ]


def test_an_operator_that_writes_to_its_argument(project, load):
    text = "import torch\n@torch.library.custom_op('reload_in::f', mutates_args=('x',))\n"
    text += "def f(x: torch.Tensor, by: float = {0}) -> None: x.mul_(by * {1})\n"
    m = load("m", text.format("2.0", 2))

    def run():
        x = one()
        m.f(x)
        return x[0].item()

    assert run() == 4
    project.write_module("m", text.format("2.0", 3))
    assert project.reload().needs_restart == [] and run() == 6
    project.write_module("m", text.format("5.0", 4))  # the default is part of the schema
    assert [n.what for n in project.reload().needs_restart] == ["m.f"] and run() == 6


def test_registrations_by_another_module_stay_and_follow(project):
    operator = OPERATOR.split("@scale.register_fake")[0].replace("{ns}", "reload_two")
    further = """
    import ops, torch
    @ops.scale.register_fake
    def _(x): return torch.empty_like(x){0}
    def backward(ctx, grad): return grad * {1}
    ops.scale.register_autograd(backward)
    """
    project.write_module("ops", operator.format(2))
    project.write_module("further", further.format("", 3))
    project.watch("ops", "further")
    ops, _ = project.load("ops"), project.load("further")

    def run():
        x = one().requires_grad_()
        y = ops.scale(x)
        y.sum().backward()
        return y[0].item(), x.grad[0].item(), ops.scale(torch.empty(2, device="meta")).dtype

    assert run() == (2, 3, torch.float32)
    project.write_module("ops", operator.format(5))
    project.reload()
    assert run() == (5, 3, torch.float32)
    project.write_module("further", further.format(".double()", 4))
    transaction = project.reloader.reload()
    assert run() == (5, 4, torch.float64)
    transaction.undo()
    assert run() == (5, 3, torch.float32)


def test_operators_defined_by_name_follow_through_many_edits(project, load):
    text = """
    import torch
    torch.library.define("reload_name::f", "(Tensor x) -> Tensor")
    @torch.library.impl("reload_name::f", "cpu")
    def _(x): return x * {0}
    @torch.library.register_fake("reload_name::f")
    def _(x): return torch.empty_like(x)
    def backward(ctx, grad): return grad * {1}
    torch.library.register_autograd("reload_name::f", backward)
    def use(x): return torch.ops.reload_name.f(x)
    """
    m = load("m", text.format(2, 3))
    overload = torch.ops.reload_name.f.default

    def run():
        x = one().requires_grad_()
        y = overload(x)
        y.sum().backward()
        return y[0].item(), x.grad[0].item(), m.use(one())[0].item()

    assert run() == (2, 3, 2)
    for value, slope in ((5, 3), (5, 7), (6, 8), (2, 3)):
        project.write_module("m", text.format(value, slope))
        transaction = project.reloader.reload()
        assert run() == (value, slope, value)
        transaction.swap()
        transaction.swap()
        assert run() == (value, slope, value)
        transaction.commit()
    project.write_module("m", text.format(9, 9))
    transaction = project.reloader.reload()
    assert run() == (9, 9, 9)
    transaction.undo()
    assert run() == (2, 3, 2)


def test_functions_that_a_module_stores_follow(project, load):
    text = """
    import torch
    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.act = helper
            self.last = lambda x: x * {0}
        def forward(self, x): return self.last(self.act(x))
    def helper(x): return x + {0}
    """
    m = load("m", text.format(2))
    block = m.Block()
    assert block(one())[0].item() == 6
    project.write_module("m", text.format(3))
    project.reload()
    assert block(one())[0].item() == 12


def test_a_reload_that_failed_holds_nothing_of_what_was_there(project, load):
    load("m", "def gone(): return 1\n")
    project.write_module("m", "def gone(): return 2\n1 / 0\n")
    with pytest.raises(ReloadError):
        project.reloader.reload()
    gc.collect()
    assert not [value for value in gc.get_objects() if type(value) is UndoLog]
