"""The detector: its measures are right, its file computes what the net computes, and it runs from end to end."""

import re
from types import ModuleType

import numpy as np
import pytest

from tests import models


@pytest.fixture(scope="module")
def script(load_example) -> ModuleType:
    return load_example("detector")


def rows(*values: tuple[float, ...]) -> np.ndarray:
    return np.array(values, np.float32)


TRUTH = rows((0, 0, 0, 10, 10), (1, 20, 20, 30, 30))


def test_measures_of_perfect_duplicate_missing_and_wrong_detections(script: ModuleType):
    found = rows((0, 0, 0, 10, 5, 0.9), (1, 0, 0, 10, 10, 0.8))
    np.testing.assert_allclose(script.overlap(found, TRUTH), [[0.5, 0], [0, 0]])  # of equal class only
    perfect = np.column_stack([TRUTH, [0.9, 0.8]]).astype(np.float32)
    assert script.mean_average_precision([perfect], [TRUTH]) == pytest.approx(2 / 3)  # the third class is not there
    assert script.f1([perfect], [TRUTH]) == 1
    doubled = np.concatenate([perfect, perfect[:1]])
    assert script.hits(doubled, TRUTH).tolist() == [True, True, False]
    assert script.f1([doubled], [TRUTH]) == pytest.approx(4 / 5)
    assert script.f1([perfect[:0]], [TRUTH]) == 0
    assert script.hits(perfect, TRUTH[:0]).tolist() == [False, False]
    wrong_first = rows((0, 20, 20, 30, 30, 0.9), (0, 0, 0, 10, 10, 0.5))
    assert script.mean_average_precision([wrong_first], [TRUTH[:1]]) == pytest.approx(0.5 / 3)


def test_targets_decode_to_the_shapes(load_example, script: ModuleType):
    """What the net is trained to say, said through the exported arithmetic, is the truth."""
    import detector_net as net

    images, truths = net.draw(8, seed=3)
    wanted, held = net.targets(truths)
    assert images.shape == (8, 1, 32, 32)
    for grid, cells, truth in zip(wanted, held, truths, strict=True):
        at = np.argwhere(cells)[:, ::-1]
        values = grid[cells > 0]
        centre = (at + values[:, 3:5]) * net.STRIDE
        half = np.exp(values[:, 5:]) * net.UNIT / 2
        boxes = np.concatenate([centre - half, centre + half], 1)
        expected = truth[np.lexsort(((truth[:, 1] + truth[:, 3]) // 8, (truth[:, 2] + truth[:, 4]) // 8))]
        np.testing.assert_allclose(boxes, expected[:, 1:], atol=1e-3)


def test_export_computes_what_the_net_computes(script: ModuleType):
    import detector_net as net
    import train_digits as nn

    layers = net.build(np.random.default_rng(0))
    images, _ = net.draw(4, seed=0)
    for _ in range(3):
        nn.run(layers, images.transpose(0, 2, 3, 1), training=True)  # moves the running statistics
    said = nn.run(layers, images.transpose(0, 2, 3, 1)).reshape(4, -1, 7)
    scale = np.array([[0.5, 0.25]] * 4, np.float32)
    scores, boxes = models.session(net.export(layers)).run(None, {"image": images, "scale_factor": scale})
    np.testing.assert_allclose(scores, 1 / (1 + np.exp(-said[..., :3])).transpose(0, 2, 1), atol=1e-4)
    grid = np.stack(np.meshgrid(np.arange(8), np.arange(8)), 2).reshape(-1, 2)
    centre, half = (grid + said[..., 3:5]) * net.STRIDE, np.exp(said[..., 5:]) * net.UNIT / 2
    expected = np.concatenate([centre - half, centre + half], 2) / [0.25, 0.5, 0.25, 0.5]
    np.testing.assert_allclose(boxes, expected, rtol=1e-3, atol=1e-2)


@pytest.mark.filterwarnings("ignore::kenosis_ort.KenosisWarning")  # hardly trained, it is far from its best
def test_runs(script: ModuleType, capsys: pytest.CaptureFixture[str]):
    script.main(["--images", "256", "--epochs", "3", "--test", "60"])
    printed = capsys.readouterr().out
    assert re.search(r"kenosis-ort +mAP [0-9.]+ +F1 [0-9.]+ +F1 against float ([0-9.]+)", printed)
    assert "Gather 'scale_xyxy': float by protected-input" in printed
