"""Promise: tests/optimizer_kinds.py prints of which kind each class of a library is, and counts the kinds."""

import optimizer_kinds
from support import whole_optimizers
from support.odd_optimizers import GlobalNorm, SignSGD


class AsksForMuon(whole_optimizers.TensorStep):
    """By parameter or elementwise, as its groups say."""

    def __init__(self, params, lr: float = 0.1):
        super().__init__(params, lr)
        if any("use_muon" not in group for group in self.param_groups):
            raise ValueError("`use_muon` must be set.")

    def update(self, group, p, gradient):
        return super().update(group, p, gradient) if group["use_muon"] else gradient


def test_each_class_has_a_row_and_each_kind_a_count(monkeypatch, capsys):
    classes = [SignSGD, whole_optimizers.RowsAndColumns, GlobalNorm, whole_optimizers.NeedsAClosure]
    monkeypatch.setattr(optimizer_kinds, "classes_of", lambda module: classes)
    assert optimizer_kinds.main(["some.module"]) == 0
    elementwise, whole, across, unsuitable, counts = capsys.readouterr().out.splitlines()
    assert elementwise == "elementwise       some.module.SignSGD()"
    assert whole.startswith(
        "by parameter      some.module.RowsAndColumns()  dimensions 0, 1, 2, 3, 4, 5; 600 bytes"
    )
    assert across.startswith("across parameters some.module.GlobalNorm()  its update of a parameter depends")
    assert unsuitable.startswith("unsuitable        some.module.NeedsAClosure()  its step failed (TypeError")
    assert counts == "some.module: 1 elementwise, 1 by parameter, 1 across parameters, 1 unsuitable"


def test_a_class_that_asks_for_an_option_is_tried_with_both_values(monkeypatch, capsys):
    monkeypatch.setattr(optimizer_kinds, "classes_of", lambda module: [AsksForMuon])
    assert optimizer_kinds.main(["some.module"]) == 0
    muon, other, counts = capsys.readouterr().out.splitlines()
    assert muon.startswith("by parameter      some.module.AsksForMuon(use_muon=True)  dimensions")
    assert other == "elementwise       some.module.AsksForMuon(use_muon=False)"
    assert counts == "some.module: 1 elementwise, 1 by parameter"


def test_a_module_that_is_not_installed_is_skipped_and_a_class_that_cannot_be_built_is_counted(
    monkeypatch, capsys
):
    class Wrapper(SignSGD):
        def __init__(self, optimizer, model):
            raise AssertionError

    def classes_of(module: str) -> list[type]:
        if module == "gone":
            raise ModuleNotFoundError("No module named 'gone'")
        return [Wrapper]

    monkeypatch.setattr(optimizer_kinds, "classes_of", classes_of)
    assert optimizer_kinds.main(["gone", "here"]) == 0
    skipped, wrapper, *counts = capsys.readouterr().out.splitlines()
    assert skipped == "gone is skipped: No module named 'gone'"
    assert wrapper.startswith("not built         here.Wrapper()  TypeError: ")
    assert counts == ["here: 1 not built"]
