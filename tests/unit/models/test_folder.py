# SPDX-License-Identifier: Apache-2.0
"""Model paths: what opens, and one line for each mistake."""

import json

import huggingface_hub.constants
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig

from tandem.errors import UserError
from tandem.models.folder import (
    check_critic_folder,
    check_folder,
    check_reward_folder,
    open_model,
    open_part,
)
from tandem.models.parallel import WHOLE
from tests.unit.models.tiny_models import NATIVE, SIZES, open_fp32, write_hf


def assert_refused(path, message: str, **options) -> None:
    with pytest.raises(UserError, match=message) as caught:
        check_folder(str(path), **options)
    assert str(caught.value).startswith(f"actor_rollout_ref.model.path='{path}': ")
    assert "\n" not in str(caught.value)


def test_a_good_folder(tmp_path):
    write_hf(NATIVE["qwen2_tied"](), tmp_path)
    folder = check_folder(str(tmp_path))
    assert folder.path == tmp_path
    assert folder.decoder_config.family == folder.hf_config["model_type"] == "qwen2"


def test_mistakes_are_named(tmp_path):
    assert_refused(tmp_path / "nothing/here", "no such folder")
    assert_refused(tmp_path, "the folder has no config.json")
    config = tmp_path / "config.json"
    config.write_text("{")
    assert_refused(tmp_path, "config.json is not valid JSON")
    config.write_text("[" * 5000)
    assert_refused(tmp_path, "config.json is not valid JSON .it is nested too deeply")
    config.write_text("5")
    assert_refused(tmp_path, "config.json is not a JSON object")
    config.write_text("{}")
    assert_refused(tmp_path, "config.json must have a model_type")
    config.write_text('{"model_type": "marvellous"}')
    assert_refused(tmp_path, "model_type 'marvellous' is unknown. Use one of qwen2, qwen3, llama, ")
    config.write_text('{"model_type": "marvellous", "auto_map": {}}')
    assert_refused(tmp_path, "Set actor_rollout_ref.model.trust_remote_code=True")
    assert_refused(tmp_path, "the folder has no model.safetensors", trust_remote_code=True)
    config.write_text(json.dumps({"model_type": "qwen2", **SIZES}))
    assert_refused(tmp_path, "the folder has no model.safetensors")
    assert check_folder(str(tmp_path), load_weight=False).decoder_config is not None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"hidden_act": "foo"}, "hidden_act 'foo' .config.json. is known neither to tandem nor to"),
        ({"rope_scaling": {"rope_type": "foo"}}, "rope_type 'foo' .config.json. is known neither"),
    ],
)
def test_a_function_that_nobody_knows_is_refused(values, message, tmp_path):
    content = {"model_type": "qwen2", **SIZES, **values}
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert_refused(tmp_path, message, load_weight=False)


def test_the_key_of_the_message_can_be_another(tmp_path):
    with pytest.raises(UserError, match=r"^model\.partial_pretrain="):
        check_folder(str(tmp_path), key="model.partial_pretrain")


def test_an_unreachable_hub_is_said_at_once(monkeypatch, tmp_path):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UserError, match="neither a local folder, nor in the Hugging Face cache"):
        check_folder("nobody/no-such-model")
    with pytest.raises(UserError, match="path='': no such folder"):
        check_folder("")


def test_random_weights_depend_on_the_seed_only(tmp_path):
    NATIVE["qwen3_biases"]().save_pretrained(tmp_path)

    def draw(seed: int, dtype: torch.dtype = torch.float32) -> dict:
        model = open_model(str(tmp_path), dtype=dtype, device="cpu", random_seed=seed)
        return model.module.state_dict()

    one, same, other = draw(0), draw(0), draw(1)
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["embedding.weight"], other["embedding.weight"])
    half = draw(0, torch.bfloat16)
    assert all(torch.equal(one[name].bfloat16(), half[name]) for name in one)
    assert one["layers.0.gate_up.weight"].std() == pytest.approx(0.02, rel=0.1)
    assert one["layers.0.qkv.bias"].abs().max() == 0
    assert one["layers.0.q_norm.weight"].min() == 1 == one["final_norm.weight"].max()


def test_a_saved_model_is_a_complete_folder(tmp_path):
    theirs = write_hf(NATIVE["llama_biases_tied"](), tmp_path / "a")
    (tmp_path / "a" / "tokenizer.json").write_text("{}")
    model = open_fp32(tmp_path / "a")
    (tmp_path / "b").mkdir()
    model.save(tmp_path / "b", torch.bfloat16)
    assert (tmp_path / "b" / "tokenizer.json").exists()
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "b", dtype="auto")
    assert reloaded.dtype == torch.bfloat16
    state = reloaded.state_dict()
    assert all(torch.equal(x.bfloat16(), state[name]) for name, x in theirs.state_dict().items())


def test_a_folder_gives_the_family_and_all_parameters(tmp_path):
    theirs = write_hf(NATIVE["qwen2_tied"](), tmp_path)
    model = open_fp32(tmp_path)
    assert model.family == "qwen2"
    assert sum(p.numel() for p in model.module.parameters()) == theirs.num_parameters()


def open_critic(path, seed: int, random_seed: int | None = None) -> dict:
    folder = check_critic_folder(
        str(path), seed=seed, load_weight=random_seed is None, key="critic.model.path"
    )
    dtype, device = torch.float32, "cpu"
    model = open_part(folder, WHOLE, dtype=dtype, device=device, random_seed=random_seed)
    return model.module.state_dict()


@pytest.mark.parametrize("family", ["qwen2_tied", "llama"])
def test_a_critic_begins_as_the_language_model_with_a_head_of_the_seeds(family, tmp_path):
    write_hf(NATIVE[family](), tmp_path)
    policy = open_fp32(tmp_path).module.state_dict()
    one, same, other = (open_critic(tmp_path, seed) for seed in (0, 0, 1))
    body = [name for name in policy if name != "lm_head.weight"]
    assert all(torch.equal(one[name], policy[name]) for name in body)
    assert one.keys() - set(body) == {"lm_head.weight", "lm_head.bias"}
    assert one["lm_head.weight"].shape == (1, SIZES["hidden_size"])
    assert one["lm_head.weight"].std() == pytest.approx(0.02, rel=0.4)
    assert one["lm_head.bias"] == 0
    assert torch.equal(one["lm_head.weight"], same["lm_head.weight"])
    assert not torch.equal(one["lm_head.weight"], other["lm_head.weight"])


def test_a_random_critic_has_the_body_of_a_random_policy(tmp_path):
    NATIVE["qwen2_tied"]().save_pretrained(tmp_path)
    policy = open_model(str(tmp_path), dtype=torch.float32, device="cpu", random_seed=5)
    critic = open_critic(tmp_path, 5, random_seed=5)
    for name, weight in policy.module.state_dict().items():
        assert torch.equal(critic[name], weight)
    assert critic["lm_head.weight"].abs().max() > 0


def test_what_cannot_be_a_critic_or_a_policy_is_named(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    (tmp_path / "model.safetensors").write_text("")
    with pytest.raises(
        UserError, match=r"^critic\.model\.path='.*': a model of type 'gpt2' cannot"
    ):
        check_critic_folder(str(tmp_path), seed=0, key="critic.model.path")
    with pytest.raises(UserError, match=r"^critic\.model\.path='nowhere/a/b': no such folder"):
        check_critic_folder("nowhere/a/b", seed=0, key="critic.model.path")
    config = {**NATIVE["llama"]().to_dict(), "architectures": ["LlamaForTokenClassification"]}
    (tmp_path / "config.json").write_text(json.dumps({**config, "id2label": {"0": "value"}}))
    assert_refused(tmp_path, "it is a critic .* Use a causal language model")
    critic = check_critic_folder(str(tmp_path), seed=0, load_weight=False, key="k")
    assert critic.value_head_seed is None


def test_what_cannot_be_a_reward_model_is_named(tmp_path):
    key = "reward_model.model.path"

    def refused_judge(config: dict, message: str) -> None:
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(UserError, match=rf"^reward_model\.model\.path='.*': {message}"):
            check_reward_folder(str(tmp_path), key=key)

    (tmp_path / "model.safetensors").write_text("")
    llama, one = NATIVE["llama"]().to_dict(), {"id2label": {"0": "LABEL_0"}}
    judge = {**llama, "architectures": ["LlamaForSequenceClassification"]}
    refused_judge({"model_type": "gpt2"}, "a model of type 'gpt2' cannot be a reward model")
    plain = {**llama, "architectures": ["LlamaForCausalLM"], **one}
    refused_judge(plain, r"architectures=\['LlamaForCausalLM'\] .* one label .* Use a reward model")
    refused_judge({**judge, "id2label": {"0": "a", "1": "b"}}, ".* one label")
    AutoModelForSequenceClassification.from_config(
        LlamaConfig(**SIZES, num_labels=1), dtype=torch.float32
    ).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**judge, **one}))
    config = check_reward_folder(str(tmp_path), key=key).decoder_config
    assert config is not None and config.has_value_head and not config.has_value_bias
    assert_refused(tmp_path, "it is a critic or a reward model")


def test_a_head_that_config_json_promises_must_be_in_the_weights(tmp_path):
    write_hf(NATIVE["llama"](), tmp_path)
    hf_config = json.loads((tmp_path / "config.json").read_text())
    names = {"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
    (tmp_path / "config.json").write_text(json.dumps(hf_config | names))
    with pytest.raises(UserError, match=r"^reward_model\.model\.path=.*'score\.weight' is missing"):
        check_reward_folder(str(tmp_path), key="reward_model.model.path")


def test_weights_of_a_wrong_kind_are_named_with_the_way_out(tmp_path):
    write_hf(NATIVE["llama"](), tmp_path)
    weights = tmp_path / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    assert_refused(tmp_path, "model.safetensors cannot be read")
    weights.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    assert_refused(tmp_path, "model.safetensors is a pointer of Git LFS.* git lfs pull")
    weights.rename(tmp_path / "pytorch_model.bin")
    assert_refused(tmp_path, "only weights in torch's format .*save_pretrained")


def test_an_adapter_and_a_model_of_another_task_are_named(tmp_path):
    base = {"base_model_name_or_path": "some/base"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(base))
    assert_refused(
        tmp_path, "it is an adapter such as LoRA .* to some/base, and .*lora_adapter_path to"
    )
    for model_type, name in (
        ("bert", "BertForMaskedLM"),
        ("qwen2_vl", "Qwen2VLForConditionalGeneration"),
    ):
        content = {"model_type": model_type, "architectures": [name]}
        (tmp_path / "config.json").write_text(json.dumps(content))
        assert_refused(tmp_path, f"{name} .* is not a causal language model of text")


def test_weights_on_the_hub_are_left_there_by_a_plan(tmp_path, monkeypatch):
    """The snapshot of a plan has everything but weights, and is not taken for a whole model."""
    name, snapshot = "some/model", tmp_path / "snapshot"
    wanted = []

    def download(path, *, allow_patterns=(), local_files_only=False):
        if local_files_only:
            raise LocalEntryNotFoundError("nothing is in the cache")
        wanted.append(allow_patterns)
        write_hf(NATIVE["llama"](), snapshot)
        (snapshot / "model.safetensors").unlink()
        return str(snapshot)

    monkeypatch.setattr("tandem.models.hub.model_info", lambda path, timeout: None)
    monkeypatch.setattr("tandem.models.hub.snapshot_download", download)
    assert check_folder(name, fetches_weights=False).decoder_config is not None
    with pytest.raises(UserError, match="has no model.safetensors"):
        check_folder(name)
    assert ["*.safetensors" in patterns for patterns in wanted] == [False, True]


def test_a_critic_may_begin_as_a_reward_model(tmp_path):
    model = AutoModelForSequenceClassification.from_config(
        LlamaConfig(**SIZES, num_labels=1), dtype=torch.float32
    )
    model.save_pretrained(tmp_path)
    critic = open_critic(tmp_path, seed=0)
    assert torch.equal(critic["lm_head.weight"], model.state_dict()["score.weight"])
    assert "lm_head.bias" not in critic
