"""Readers of demonstrations, on small files in the published layouts."""

import gc
import io
import json
import lzma
import re
import shutil
import time
import warnings
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from driftgen import InputError
from driftgen.policy.episode_files import open_episodes
from driftgen.support import peak_memory
from tests.support.fault_search import listening

ENDS = np.array([4, 9, 12])


@pytest.fixture(autouse=True, scope="module")
def _libraries():
    """Import the libraries of a run before the first test is timed."""
    import_module("matplotlib.pyplot")
    import_module("driftgen.training.run")
    import_module("driftgen.training.policy_task")
    with suppress(ImportError):
        import_module("zarr")


def pusht_arrays(steps=12):
    random = np.random.default_rng(0)
    return {
        "state": random.uniform(0, 512, (steps, 5)).astype(np.float32),
        "keypoint": random.uniform(0, 512, (steps, 9, 2)).astype(np.float32),
        "action": random.uniform(0, 512, (steps, 2)).astype(np.float32),
        "n_contacts": np.zeros((steps, 1), np.float32),
        "img": random.integers(0, 256, (steps, 8, 8, 3)).astype(np.float32),
    }


def write_zarr(path, arrays, ends, zarr_format=2):
    zarr = pytest.importorskip("zarr")
    root = zarr.open_group(str(path), mode="w", zarr_format=zarr_format)
    for group, members in (("data", arrays), ("meta", {"episode_ends": ends})):
        made = root.create_group(group)
        for name, array in members.items():
            stored = made.create_array(name, shape=array.shape, chunks=array.shape, dtype=array.dtype)
            stored[:] = array
    return path


def write_robomimic(path, lengths, cameras=False, mask=None):
    h5py = pytest.importorskip("h5py")
    random = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        for number, length in enumerate(lengths):
            demo = file.create_group(f"data/demo_{number}")
            demo["actions"] = random.uniform(-1, 1, (length, 7))
            for name, size in (("object", 10), ("robot0_eef_pos", 3), ("robot0_eef_quat", 4)):
                demo[f"obs/{name}"] = np.full((length, size), float(number))
            demo["obs/robot0_gripper_qpos"] = random.normal(size=(length, 2))
            for name in ("agentview_image", "robot0_eye_in_hand_image") if cameras else ():
                demo[f"obs/{name}"] = random.integers(0, 256, (length, 6, 6, 3)).astype(np.uint8)
        for name, demos in (mask or {}).items():
            file[f"mask/{name}"] = np.array(demos, dtype="S8")
    return path


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_diffusion_policy_zarr(tmp_path, zarr_format):
    arrays = pusht_arrays()
    path = write_zarr(tmp_path / "pusht.zarr", arrays, ENDS, zarr_format)
    episodes = open_episodes(path)
    assert episodes.ends.tolist() == ENDS.tolist()
    state = np.concatenate([arrays["keypoint"].reshape(12, 18), arrays["state"][:, :2]], axis=1)
    assert np.array_equal(episodes.observations["observation.state"], state)
    assert np.array_equal(episodes.actions, arrays["action"])
    pose = open_episodes(path, "pose").observations
    assert np.array_equal(pose["observation.state"], arrays["state"])
    image = open_episodes(path, "image", limit=2)
    assert len(image) == 2
    assert image.shapes == {"observation.state": (2,), "observation.image": (8, 8, 3)}
    assert image.observations["observation.image"].dtype == np.uint8
    assert np.array_equal(image.observations["observation.image"], arrays["img"][:9])
    shutil.make_archive(str(tmp_path / "packed.zarr"), "zip", path)
    assert np.array_equal(open_episodes(tmp_path / "packed.zarr.zip").actions, arrays["action"])


@pytest.mark.parametrize(
    ("start", "header"), [(4, "60030076f1bc8a1b"), (8, "00000000"), (12, "ffffff7f"), (0, "")]
)
@pytest.mark.parametrize("packed", [False, True])
def test_blosc_trusts_its_header(tmp_path, start, header, packed):
    # Sizes of the first case made Blosc end the process where memory is limited.
    path = write_zarr(tmp_path / "pusht.zarr", pusht_arrays(), ENDS)
    chunk = path / "data" / "action" / "0.0"
    content, changed = chunk.read_bytes(), bytes.fromhex(header)
    chunk.write_bytes(content[:start] + changed + content[start + len(changed) :] if header else content[:9])
    if packed:
        path = Path(shutil.make_archive(str(path), "zip", path))
    with pytest.raises(InputError, match=r"data/action/0\.0 is damaged \(its header"):
        open_episodes(path)


def test_npz_and_the_frames_beside_it(tmp_path):
    arrays = pusht_arrays()
    frames = arrays.pop("img").astype(np.uint8)
    np.savez(tmp_path / "pusht_lowdim.npz", episode_ends=ENDS, **arrays)
    with lzma.open(tmp_path / "pusht_img_u8_12x8x8x3.raw.xz", "wb") as file:
        file.write(frames.tobytes())
    assert open_episodes(tmp_path).shapes == {"observation.state": (20,)}
    episodes = open_episodes(tmp_path, "image")
    assert np.array_equal(episodes.observations["observation.image"], frames)
    assert np.array_equal(
        open_episodes(tmp_path, "image", limit=1).observations["observation.image"], frames[:4]
    )
    own = open_episodes(tmp_path, "state, n_contacts")
    assert own.shapes == {"observation.state": (6,)}
    (tmp_path / "pusht_img_u8_12x8x8x3.raw.xz").write_bytes(b"no xz file")
    with pytest.raises(InputError, match="cannot be read"):
        open_episodes(tmp_path, "image")


def test_frames_of_a_zarr_that_are_not_read_need_no_memory(tmp_path, monkeypatch):
    path = write_zarr(tmp_path / "pusht.zarr", pusht_arrays(), ENDS)
    monkeypatch.setattr(peak_memory, "total_memory", lambda device: 5_000)
    assert open_episodes(path, "state").steps == ENDS[-1]
    with pytest.raises(
        InputError, match=r"pusht\.zarr: data/img takes .* of memory at least, the machine has"
    ):
        open_episodes(path, "image")


def test_readers_print_no_warnings_of_libraries(tmp_path):
    """A file of the system in a folder, and numbers beyond float32, which are refused in one line."""
    path = write_zarr(tmp_path / "pusht.zarr", pusht_arrays(), ENDS)
    (path / ".DS_Store").write_bytes(b"x")
    large = pusht_arrays() | {"keypoint": np.full((12, 9, 2), 1e300)}
    np.savez(tmp_path / "large.npz", episode_ends=ENDS, **large)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(open_episodes(path)) == 3
        with pytest.raises(InputError, match="not finite"):
            open_episodes(tmp_path / "large.npz")


def test_damaged_groups_of_a_zarr_are_one_line(tmp_path):
    """zarr's listing opens all members at once and prints the errors of the others when they are freed."""
    path = write_zarr(tmp_path / "pusht.zarr", pusht_arrays(), ENDS)
    for file in [*path.glob("*/.zgroup"), *path.glob("*/*/.zarray")]:
        file.write_text("{")
    with listening() as said:
        for _ in range(5):
            with pytest.raises(InputError, match=r"pusht\.zarr cannot be read as zarr"):
                open_episodes(path)
        time.sleep(0.1)  # its tasks run in another thread
        gc.collect()
    assert not said


def test_blockpush_zarr(tmp_path):
    arrays = {"obs": np.random.default_rng(0).normal(size=(12, 16)), "action": np.zeros((12, 2))}
    episodes = open_episodes(write_zarr(tmp_path / "multimodal_push_seed.zarr", arrays, ENDS))
    assert episodes.shapes == {"observation.state": (16,)}
    assert episodes.actions.shape == (12, 2)
    assert np.array_equal(episodes.observations["observation.state"], arrays["obs"].astype(np.float32))


def test_robomimic_states_in_the_order_of_their_numbers(tmp_path):
    lengths = list(range(3, 15))  # demo_10 comes after demo_9
    path = write_robomimic(tmp_path / "low_dim.hdf5", lengths, mask={"train": ["demo_10", "demo_2"]})
    episodes = open_episodes(path)
    assert episodes.lengths.tolist() == lengths
    assert episodes.shapes == {"observation.state": (19,)}
    assert [part.observations["observation.state"][0, 0] for part in episodes] == list(range(12))
    train = open_episodes(path, subset="train")
    assert [part.observations["observation.state"][0, 0] for part in train] == [2, 10]
    with pytest.raises(InputError, match="has the subsets train"):
        open_episodes(path, subset="valid")


def test_robomimic_cameras(tmp_path):
    path = write_robomimic(tmp_path / "image.hdf5", [3, 4], cameras=True)
    assert open_episodes(path, "image").shapes == {
        "observation.state": (9,),
        "observation.images.agentview": (6, 6, 3),
        "observation.images.robot0_eye_in_hand": (6, 6, 3),
    }
    one = open_episodes(path, "agentview_image,robot0_eef_pos")
    assert one.shapes == {"observation.state": (3,), "observation.image": (6, 6, 3)}
    assert open_episodes(path, limit=1).ends.tolist() == [3]


def test_robomimic_arrays_in_an_npz_file(tmp_path):
    arrays = {"object": 10, "robot0_eef_pos": 3, "robot0_eef_quat": 4, "robot0_gripper_qpos": 2}
    arrays = {f"obs_{name}": np.zeros((12, size)) for name, size in arrays.items()}
    np.savez(tmp_path / "lift.npz", actions=np.zeros((12, 7)), episode_ends=ENDS, **arrays)
    assert open_episodes(tmp_path / "lift.npz").shapes == {"observation.state": (19,)}


@pytest.mark.parametrize("steps_first", [False, True])
def test_kitchen_arrays_in_both_orders(tmp_path, steps_first):
    random = np.random.default_rng(0)
    observations, actions = random.normal(size=(3, 6, 60)), random.normal(size=(3, 6, 9))
    mask = (np.arange(6) < np.array([[4], [6], [2]])).astype(np.float64)
    for name, array in (
        ("observations_seq", observations),
        ("actions_seq", actions),
        ("existence_mask", mask),
    ):
        np.save(tmp_path / f"{name}.npy", np.swapaxes(array, 0, 1) if steps_first else array)
    episodes = open_episodes(tmp_path)
    assert episodes.lengths.tolist() == [4, 6, 2]
    assert episodes.shapes == {"observation.state": (60,)}
    assert np.array_equal(episodes.actions[10:], actions[2, :2].astype(np.float32))
    assert open_episodes(tmp_path, limit=2).steps == 10
    np.save(tmp_path / "existence_mask.npy", np.array([[1, 0, 1], [0, 1, 0]]))
    with pytest.raises(InputError, match="expected \\[episodes, steps"):
        open_episodes(tmp_path)
    (tmp_path / "actions_seq.npy").unlink()
    with pytest.raises(InputError, match=r"actions_seq.npy does not exist"):
        open_episodes(tmp_path)


def test_lerobot_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    random = np.random.default_rng(0)
    frames = random.integers(0, 256, (12, 4, 4, 3)).astype(np.uint8)

    def png(frame):
        Image.fromarray(frame).save(file := io.BytesIO(), "PNG")
        return {"bytes": file.getvalue(), "path": None}

    episode = np.searchsorted(ENDS, np.arange(12), side="right")
    frame = np.arange(12) - np.concatenate([[0], ENDS])[episode]
    order = random.permutation(12)  # rows need not be in order
    state = random.normal(size=(12, 2)).astype(np.float32)
    table = {
        "observation.state": state[order].tolist(),
        "observation.image": [png(frames[i]) for i in order],
        "action": (10 * state)[order].tolist(),
        "episode_index": episode[order],
        "frame_index": frame[order],
    }
    (tmp_path / "meta").mkdir()
    (tmp_path / "meta" / "info.json").write_text(json.dumps({"codebase_version": "v2.1"}))
    (tmp_path / "data" / "chunk-000").mkdir(parents=True)
    for part in range(2):
        rows = pyarrow.table(table).slice(6 * part, 6)
        parquet.write_table(rows, tmp_path / "data" / "chunk-000" / f"episode_{part:06d}.parquet")
    episodes = open_episodes(tmp_path)
    assert episodes.ends.tolist() == ENDS.tolist()
    assert np.array_equal(episodes.observations["observation.state"], state)
    assert np.array_equal(episodes.observations["observation.image"], frames)
    assert np.array_equal(episodes.actions, 10 * state)
    assert open_episodes(tmp_path, "observation.state", limit=1).shapes == {"observation.state": (2,)}
    with pytest.raises(InputError, match=r"has no column observation.images.top"):
        open_episodes(tmp_path, "observation.images.top")


def test_bad_files_give_one_line(tmp_path):
    def fails(match, path=tmp_path, *args, **options):
        with pytest.raises(InputError, match=match) as raised:
            open_episodes(path, *args, **options)
        assert "\n" not in str(raised.value)

    fails("does not exist", tmp_path / "none")
    fails("is not a known data set")
    arrays = pusht_arrays()
    zarr = write_zarr(tmp_path / "pusht.zarr", arrays, np.array([4, 3, 12]))
    fails("the end of episode 1 is 3, the end before it is 4", zarr)
    fails("is no robomimic file", zarr, subset="train")
    fails("limit=0", zarr, limit=0)
    fails("has no keypoint_3d for observe='keypoint_3d'", zarr, "keypoint_3d")
    for part in ("state[:x]", "state[2]", "state[:0]", "state[:-1]", "state[", "img[:2]"):
        fails(re.escape(f"{part} names no columns of"), zarr, part)
    np.savez(tmp_path / "e.npz", episode_ends=np.zeros(0, int), obs=np.zeros((0, 2)), action=np.zeros((0, 2)))
    fails("e.npz: episode ends have shape", tmp_path / "e.npz")
    (tmp_path / "e.npz").unlink()
    np.savez(tmp_path / "a.npz", **arrays)
    fails("holds several data sets")
    fails("a.npz has no episode_ends", tmp_path / "a.npz")
    np.savez(tmp_path / "a.npz", episode_ends=ENDS, obs=np.zeros((12, 2)))
    fails("a.npz has no action but obs", tmp_path / "a.npz")
    (tmp_path / "a.npz").write_bytes(b"nothing")
    fails("a.npz cannot be read as an array", tmp_path / "a.npz")
    (tmp_path / "b.hdf5").write_bytes(b"nothing")
    fails("b.hdf5 cannot be read as HDF5", tmp_path / "b.hdf5")
    demo = write_robomimic(tmp_path / "c.hdf5", [3])
    fails("has no agentview_image for observe='image'", demo, "image")
    shutil.rmtree(zarr / "meta")
    fails("has no meta/episode_ends", zarr)


@pytest.mark.parametrize("recipe", ["pusht-state", "pusht-image"])
def test_training_refuses_actions_that_the_environment_does_not_take(here, tmp_path, recipe):
    arrays = pusht_arrays(40)
    arrays["action"][7] = [600.0, 10.0]
    np.savez(tmp_path / "a.npz", episode_ends=[40], **arrays)
    done = here(
        "policy", "train", recipe, "--set", f"data.path={tmp_path / 'a.npz'}", "--out", tmp_path / "r"
    )
    assert done.returncode == 2
    assert "action 0 of step 7 is 600, PushT takes 0 to 512" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_robomimic_file_of_other_things(tmp_path):
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "x.hdf5", "w") as file:
        file["data/demo_0/states"] = np.zeros((3, 2))
    with pytest.raises(InputError, match="expected obs and actions"):
        open_episodes(tmp_path / "x.hdf5")
    with h5py.File(tmp_path / "x.hdf5", "w") as file:
        file["other"] = np.zeros(3)
    with pytest.raises(InputError, match="has no data/demo_0"):
        open_episodes(tmp_path / "x.hdf5")
