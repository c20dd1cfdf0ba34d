"""Hugging Face adapters: the summed loss is the architecture's own, configurations are completed or refused."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("transformers")

from elaswave_fx.build.make_model import notes_of
from elaswave_fx.config.compose import load_config
from elaswave_fx.config.keys import ModelConfig
from elaswave_fx.errors import CaptureError, ConfigError
from elaswave_fx.models import build_model, check_output
from elaswave_fx.models.hf_causal import check_causal
from elaswave_fx.models.hf_config import refuse_other_classes, resolve, task_of
from elaswave_fx.models.hf_loss import check_own_loss
from elaswave_fx.models.sizes import DataSizes
from elaswave_fx.models.weights import unused_tensors

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 2}
LLAMA = {**SMALL, "num_key_value_heads": 1}
VIT = {**SMALL, "patch_size": 2}
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
VOCAB, TOKENS = 97, 12
MODELS = [
    ("gpt2", GPT2, "causal_lm"),
    ("llama", LLAMA, "causal_lm"),
    ("bert", SMALL, "masked_lm"),
    ("vit", VIT, "image_classification"),
    ("t5", T5, "seq2seq_lm"),
]


def build(name, options, task=None, *, seed=0, init_from=None, vocab_size=VOCAB, seq_len=TOKENS, mask_token=None):
    images = {"image_shape": (1, 8, 8), "classes": 10, "vocab_size": None, "seq_len": None}
    is_of_images = name == "vit" or task == "image_classification"
    sizes = images if is_of_images else {"vocab_size": vocab_size, "seq_len": seq_len}
    config = ModelConfig(kind="hf", name=name, task=task, options=options, mask_token=mask_token)
    return build_model(config, seed=seed, init_from=init_from, **sizes)


def test_a_model_without_a_limit_takes_samples_of_any_length():
    options = {"d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 16}
    loss, count = build("xlnet", options, "causal_lm")(**inputs_of("xlnet", 2))
    assert loss.isfinite() and int(count) == 2 * TOKENS


def inputs_of(name, batch, seed=1):
    torch.manual_seed(seed)
    if name == "vit":
        return {"image": torch.rand(batch, 1, 8, 8), "label": torch.randint(10, (batch,))}
    return {"input_ids": torch.randint(VOCAB, (batch, TOKENS)), "labels": torch.randint(VOCAB, (batch, TOKENS))}


@pytest.mark.parametrize(("name", "options", "task"), MODELS, ids=[name for name, *_ in MODELS])
def test_exports_with_a_dynamic_batch_and_has_gradients(name, options, task):
    model, example = build(name, options, task), inputs_of(name, 3)
    batch = torch.export.Dim("batch", min=2, max=64)
    shapes = {key: {0: batch} for key in example}
    exported = torch.export.export(model, (), example, dynamic_shapes=shapes, strict=False).module()
    fresh = inputs_of(name, 5, seed=2)
    torch.manual_seed(3)
    loss, count = check_output(model(**fresh))
    torch.manual_seed(3)
    torch.testing.assert_close(exported(**fresh), (loss, count))
    assert float(loss.detach() / count) == pytest.approx(math.log(10 if name == "vit" else VOCAB), rel=0.3)
    loss.backward()
    assert [key for key, each in model.named_parameters() if each.grad is None] == []


@pytest.mark.parametrize(("name", "options"), [("gpt2", GPT2), ("llama", LLAMA), ("vit", VIT)])
def test_the_sum_is_the_architectures_mean_times_the_count(name, options):
    model, batch = build(name, options).eval(), inputs_of(name, 4)
    loss, count = model(**batch)
    if name == "vit":
        mean = model.model(pixel_values=batch["image"], labels=batch["label"]).loss
    else:
        mean = model.model(input_ids=batch["input_ids"], labels=batch["labels"], shift_labels=batch["labels"]).loss
    torch.testing.assert_close(loss / count, mean, rtol=1e-5, atol=1e-6)


def test_masked_lm_scores_the_drawn_tokens_only():
    model = build("bert", SMALL, "masked_lm").eval()
    batch = inputs_of("bert", 64)
    assert model.mask_token == VOCAB and model.model.config.vocab_size == VOCAB + 1
    torch.manual_seed(5)
    drawn = torch.rand(64, TOKENS) < 0.15
    torch.manual_seed(5)
    loss, count = model(**batch)
    assert int(count) == int(drawn.sum())
    logits = model.model(input_ids=torch.where(drawn, VOCAB, batch["input_ids"])).logits
    expected = torch.nn.functional.cross_entropy(logits[drawn], batch["input_ids"][drawn], reduction="sum")
    torch.testing.assert_close(loss, expected)


def test_masked_lm_leaves_padding_alone():
    model = build("bert", SMALL, "masked_lm").eval()
    batch = inputs_of("bert", 64)
    mask = (torch.arange(TOKENS) < TOKENS // 2).long().expand(64, TOKENS)
    torch.manual_seed(5)
    drawn = (torch.rand(64, TOKENS) < 0.15) & (mask != 0)
    torch.manual_seed(5)
    loss, count = model(**batch, attention_mask=mask)
    assert int(count) == int(drawn.sum()) > 0
    shown = torch.where(drawn, VOCAB, batch["input_ids"])
    logits = model.model(input_ids=shown, attention_mask=mask).logits
    expected = torch.nn.functional.cross_entropy(logits[drawn], batch["input_ids"][drawn], reduction="sum")
    torch.testing.assert_close(loss, expected)


def test_seq2seq_reads_the_labels_before_each():
    model = build("t5", T5).eval()
    batch = inputs_of("t5", 2)
    expected = model.model(input_ids=batch["input_ids"], labels=batch["labels"]).loss
    loss, count = model(**batch)
    torch.testing.assert_close(loss / count, expected)


BART = {
    "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "pad_token_id": 1, "decoder_start_token_id": 2,
}  # fmt: skip


@pytest.mark.parametrize("name", ["bart", "mbart"])
def test_a_class_of_several_tasks_is_trained_as_the_types_own(name, tmp_path):
    build(name, BART, "seq2seq_lm").model.save_pretrained(tmp_path)
    assert task_of(ModelConfig(kind="hf", name="", task=None, options={}, mask_token=None), tmp_path) == "seq2seq_lm"


@pytest.mark.parametrize(
    ("name", "options"),
    [("t5", T5), ("bart", BART), ("mbart", BART), ("pegasus", BART), ("blenderbot", BART), ("m2m_100", BART)],
)
def test_seq2seq_shifts_labels_as_the_architecture_does(name, options):
    model = build(name, options, "seq2seq_lm").eval()
    inputs = inputs_of(name, 3)
    labels = inputs["labels"].clamp(min=5)
    labels[:, 3:5] = -100
    labels[1, 8:] = -100
    with torch.no_grad():
        loss, count = model(inputs["input_ids"], labels)
        theirs = model.model(input_ids=inputs["input_ids"], labels=labels).loss
    assert float(loss / count) == pytest.approx(float(theirs), rel=1e-5)


def test_an_encoder_type_as_causal_lm_does_not_look_ahead():
    model = build("bert", {**SMALL, "hidden_dropout_prob": 0.0}).eval()
    ids = torch.arange(TOKENS)[None]
    changed = ids.clone()
    changed[0, -1] = 50
    labels = torch.full((1, TOKENS), -100)
    labels[0, :-1] = 7
    torch.testing.assert_close(model(ids, labels), model(changed, labels))


def test_configurations_are_completed_from_the_data():
    config = build("gpt2", GPT2, seq_len=2000).model.config
    assert (config.vocab_size, config.n_positions, config.use_cache) == (VOCAB, 2000, False)
    assert config.eos_token_id is None  # 50256 is no token of this vocabulary
    assert config._attn_implementation == "sdpa"
    config = build("vit", VIT).model.config
    assert (config.num_channels, config.image_size, config.num_labels) == (1, 8, 10)
    kept = build("gpt2", {**GPT2, "vocab_size": 128, "n_positions": 64}).model.config
    assert (kept.vocab_size, kept.n_positions) == (128, 64)


def test_ties_stay_and_the_seed_decides():
    model = build("gpt2", GPT2)
    assert model.model.lm_head.weight is model.model.transformer.wte.weight
    first, again = model.state_dict(), build("gpt2", GPT2).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize("task", ["masked_lm", "causal_lm"])
def test_a_folder_names_its_task(task, tmp_path):
    options = {**SMALL, "vocab_size": VOCAB + 1}
    build("bert", options, task, mask_token=VOCAB if task == "masked_lm" else None).model.save_pretrained(tmp_path)
    again = ModelConfig(kind="hf", name=None, task=None, options={}, mask_token=VOCAB if task == "masked_lm" else None)
    assert task_of(again, tmp_path) == task
    built = build_model(again, seed=0, init_from=tmp_path, vocab_size=VOCAB, seq_len=TOKENS)
    assert type(built).__name__ == {"masked_lm": "MaskedLM", "causal_lm": "CausalLM"}[task]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("lama", {}), "model.name=lama: is no model type of transformers; nearest valid: llama"),
        (("gpt2", {"dtype": "bfloat16"}), "model.config.dtype=bfloat16: has no effect, .*; precision=bf16 computes in"),
        (("gpt2", {"n_layr": 2}), "model.config.n_layr: is no option of gpt2; nearest valid: n_layer"),
        (("gpt2", {**GPT2, "rope_theta": 5.0}), "model.config.rope_theta: is no option of gpt2"),
        (("gpt2", {**GPT2, "past_key_values": 3}), "model.config.past_key_values: is no option of gpt2"),
        (("llama", {"partial_rotary_factor": 0.5}), "model.config.partial_rotary_factor: is no option of llama"),
        (("bert", {**SMALL, "is_decoder": False}, "causal_lm"), "is_decoder=False: every token would see .*=true"),
        (("gpt2", {"n_layer": "two"}), "model.config: does not suit gpt2.*n_layer"),
        (("gpt2", {"n_embd": 16, "n_head": 3}), "model.config: does not suit gpt2"),
        (("gpt2", GPT2, "masked_lm"), "model.task=masked_lm: does not exist for gpt2; it has causal_lm"),
        (("gpt2", GPT2, "causal"), "model.task=causal: is unknown; nearest valid: causal_lm"),
        (("dpt", {}), "model.name=dpt: has no model for any of the tasks causal_lm"),
        (("gpt2", {**GPT2, "vocab_size": 50}), "model.config.vocab_size=50: is too small, the tokenizer has 97 tokens"),
        (("bert", {**SMALL, "vocab_size": 97}, "masked_lm"), "97 tokens, the mask one more"),
        (("gpt2", {**GPT2, "n_positions": 8}), "model.config.n_positions=8: is too small for seq_len=12"),
        (("vit", {**VIT, "patch_size": 16}), "model.config.patch_size=16: does not divide the image size 8"),
        (("vit", {**VIT, "num_channels": 3}), "model.config.num_channels=3: does not fit the data"),
        (("vit", {**VIT, "num_labels": 3}), "model.config.num_labels=3: is too small, the data has 10 classes"),
    ],
)
def test_refusals(arguments, message):
    with pytest.raises(ConfigError, match=message):
        build(*arguments)


@pytest.mark.parametrize(
    ("name", "key", "value", "found"),
    [
        ("gpt_neox", "rotary_pct", 0.5, lambda config: config.rope_parameters["partial_rotary_factor"]),
        ("gpt_neox", "rotary_emb_base", 500, lambda config: config.rope_parameters["rope_theta"]),
        ("llama", "rope_theta", 10000.0, lambda config: config.rope_parameters["rope_theta"]),
        ("deberta-v2", "position_buckets", 4, lambda config: config.position_buckets),
    ],
)
def test_options_that_a_class_takes_without_declaring_them_are_taken(name, key, value, found):
    sizes = DataSizes(vocab_size=VOCAB, seq_len=TOKENS)
    assert found(resolve(name, {key: value}, task=None, sizes=sizes).config) == value


def test_a_type_that_is_always_causal_may_say_that_it_is_no_decoder():
    options = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    assert build("gpt_neox", {**options, "is_decoder": False}).model.config.is_decoder is False


def test_images_with_their_channels_last_are_refused():
    config = ModelConfig(kind="hf", name="vit", task="image_classification", options={**SMALL, "patch_size": 1})
    sizes = {"vocab_size": None, "seq_len": None, "classes": 4}
    with pytest.raises(
        ConfigError, match=r"images of \[8, 8, 3\] look like height x width x channels; .*num_channels=8"
    ):
        build_model(config, seed=0, image_shape=(8, 8, 3), **sizes)
    build_model(config, seed=0, image_shape=(3, 8, 8), **sizes)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("dinov2", {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4}),
        ("swin", {"patch_size": 1, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4}),
        ("convnext", {"depths": [1, 1], "hidden_sizes": [8, 8], "num_stages": 2}),
    ],
)
def test_types_that_take_images_of_any_size_do(name, options):
    model = build(name, {**options, "image_size": 224}, "image_classification")
    assert model.model.config.image_size == 224
    loss, count = model(torch.rand(2, 1, 8, 8), torch.tensor([0, 1]))
    assert (loss.isfinite(), count) == (True, 2)


@pytest.mark.parametrize("name", ["opt", "roberta", "bert"])
def test_padding_is_no_token_of_a_tokenizer_that_is_trained_here(name):
    options = dict(SMALL)
    if name == "opt":
        options |= {"ffn_dim": options.pop("intermediate_size"), "word_embed_proj_dim": 16}
    config = ModelConfig(kind="hf", name=name, task="causal_lm", options=options, mask_token=None)
    model = build_model(config, seed=0, vocab_size=VOCAB, seq_len=TOKENS, tokenizer="bpe").model
    assert (model.config.vocab_size, model.config.pad_token_id) == (VOCAB + 1, VOCAB)
    assert build(name, options, "causal_lm").model.config.pad_token_id in (0, 1), "data of others may have padding"


def test_bytes_are_not_the_tokens_of_a_vocabulary_that_a_model_brings():
    sizes = {"vocab_size": 256, "seq_len": 8, "seed": 0, "tokenizer": "bytes"}
    gpt2 = {**GPT2, "vocab_size": 50257}
    with pytest.raises(ConfigError, match="tokenizer=bytes: the model has 50257 tokens of a tokenizer of its own"):
        build_model(ModelConfig(kind="hf", task=None, name="gpt2", options=gpt2), **sizes)
    for options in ({**GPT2, "vocab_size": 384}, GPT2):
        build_model(ModelConfig(kind="hf", task=None, name="gpt2", options=options), **sizes)
    build_model(ModelConfig(kind="hf", task=None, name="gpt2", options=gpt2), **{**sizes, "tokenizer": None})


@pytest.mark.parametrize(
    ("tokenizer", "vocab_size", "file", "words"),
    [
        ("bpe", 300, None, "(300 of them), and tokenizer=bpe was trained on this data"),
        ("bpe", 300, "tokenizer.json", "(its tokenizer.json says which), and tokenizer=bpe was trained on this data"),
        ("bytes", 384, None, "(384 of them), and tokenizer=bytes takes the bytes of the text for ids"),
        ("bytes", 256, "tokenizer_config.json", "(its tokenizer_config.json says which), and tokenizer=bytes takes"),
        ("bytes", 256, None, None),
        (None, 300, "tokenizer.json", None),
    ],
)
def test_weights_are_not_given_the_tokens_of_another_tokenizer(tmp_path, tokenizer, vocab_size, file, words):
    build("gpt2", {**GPT2, "vocab_size": vocab_size}).model.save_pretrained(tmp_path)
    if file is not None:
        (tmp_path / file).write_text("{}")
    config = ModelConfig(kind="hf", task=None, name="", options={})
    known = {"vocab_size": min(vocab_size, 256), "seq_len": 8, "seed": 0, "tokenizer": tokenizer}
    if words is None:
        build_model(config, init_from=tmp_path, **known)
        return
    with pytest.raises(ConfigError) as caught:
        build_model(config, init_from=tmp_path, **known)
    assert words in str(caught.value)
    assert str(caught.value).endswith("data=memmap, or data=hf with a column of token ids")


def test_the_architectures_own_output_is_refused_by_name():
    model = build("gpt2", GPT2)
    ids = inputs_of("gpt2", 2)["input_ids"]
    with pytest.raises(CaptureError, match=r"returns CausalLMOutput.* with loss, logits; a model returns"):
        check_output(model.model(input_ids=ids, labels=ids))


@pytest.mark.parametrize("shard_size", ["1GB", "6KB"], ids=["one file", "shards"])
@pytest.mark.parametrize(("name", "options", "task"), MODELS, ids=[name for name, *_ in MODELS])
def test_weights_come_from_a_folder(tmp_path, name, options, task, shard_size):
    source = build(name, options, task, seed=1)
    source.model.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_size == "6KB")
    loaded = build(name, {}, task, seed=2, init_from=tmp_path)
    theirs, ours = source.state_dict(), loaded.state_dict()
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[key], ours[key]) for key in theirs)
    ties = [len({id(each) for each in model.parameters()}) for model in (source, loaded)]
    assert ties[0] == ties[1]


def test_the_folder_may_name_the_type(tmp_path):
    build("gpt2", GPT2, seed=1).model.save_pretrained(tmp_path)
    assert build("", {}, init_from=tmp_path).model.config.n_layer == 2


def test_a_folder_with_another_output_layer_than_the_one_that_is_tied_is_refused(tmp_path):
    build("gpt2", {**GPT2, "tie_word_embeddings": False}, seed=1).model.save_pretrained(tmp_path)
    assert build("gpt2", {}, init_from=tmp_path).model.lm_head.weight is not None
    words = (
        r"init_from=.*: has lm_head.weight and transformer.wte.weight with different values, and the model ties them"
    )
    with pytest.raises(ConfigError, match=words + "; nearest valid: model.config.tie_word_embeddings=false"):
        build("gpt2", {"tie_word_embeddings": True}, init_from=tmp_path)


def test_the_start_token_of_a_decoder_may_be_given():
    assert build("t5", {**T5, "decoder_start_token_id": 3}).model.config.decoder_start_token_id == 3


def test_a_folder_that_does_not_fit_is_refused_by_name(tmp_path):
    build("gpt2", GPT2, seed=1).model.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"the folder lacks transformer\.h\.2\..* and 8 more"):
        build("gpt2", {"n_layer": 3}, init_from=tmp_path)
    with pytest.raises(ConfigError, match=r"the model has no transformer\.h\.1\."):
        build("gpt2", {"n_layer": 1}, init_from=tmp_path)
    with pytest.raises(ConfigError, match=r"shapes differ at .*\(folder 97x16, model 120x16\)"):
        build("gpt2", {"vocab_size": 120}, init_from=tmp_path)
    with pytest.raises(ConfigError, match=r"model.name=llama: init_from=.* holds a model of type gpt2"):
        build("llama", LLAMA, init_from=tmp_path)


def test_a_folder_may_have_heads_of_other_tasks(tmp_path):
    """As those that are trained for masked tokens and for the order of sentences."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    transformers.BertForPreTraining(transformers.BertConfig(vocab_size=VOCAB + 1, **SMALL)).save_pretrained(tmp_path)
    built = build("bert", {}, task="masked_lm", init_from=tmp_path, mask_token=VOCAB)
    assert {"cls.seq_relationship.weight", "cls.seq_relationship.bias"} <= {*unused_tensors(built)}
    (note,) = notes_of(load_config(["model=hf", "model.task=masked_lm", f"init_from={tmp_path}"]), built)
    assert "are ignored: the model has no such module" in note
    state = load_file(tmp_path / "model.safetensors")
    assert torch.equal(built.model.cls.predictions.bias, state["cls.predictions.bias"])


def test_an_older_name_of_what_the_folder_gives_is_refused(tmp_path):
    build("llama", LLAMA, seed=1).model.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"rope_theta=500: has no effect, as config.json of init_from has rope_par"):
        build("llama", {"rope_theta": 500}, init_from=tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    same = build("llama", {"rope_theta": config["rope_parameters"]["rope_theta"]}, init_from=tmp_path)
    other = build("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}, init_from=tmp_path)
    scratch = build("llama", {**LLAMA, "rope_theta": 500})
    buffers = [each.model.model.rotary_emb.inv_freq for each in (same, other, scratch)]
    assert torch.equal(buffers[1], buffers[2]) and not torch.equal(buffers[0], buffers[1])


def test_a_folder_with_more_in_its_layers_is_refused(tmp_path):
    build("llama", LLAMA, seed=1).model.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    more = {"model.layers.0.self_attn.q_norm.weight": torch.ones(8)}
    save_file({**state, **more}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"the model has no model\.layers\.0\.self_attn\.q_norm\.weight"):
        build("llama", {}, init_from=tmp_path)


def test_a_folder_of_another_task_needs_one_of_ours(tmp_path):
    config = {"model_type": "bert", "architectures": ["BertForSequenceClassification"], **SMALL, "is_decoder": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ConfigError, match="holds a BertForSequenceClassification, .* of none of the tasks causal_lm, mask"
    ):
        build("bert", {}, init_from=tmp_path)
    with pytest.raises(ConfigError, match=r"holds no \.safetensors file"):
        build("bert", {}, "masked_lm", init_from=tmp_path, mask_token=3)


def test_a_folder_without_weights_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        build("gpt2", GPT2, init_from=tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="names no model_type"):
        build("gpt2", GPT2, init_from=tmp_path)
    quantized = {"model_type": "gpt2", "quantization_config": {"load_in_8bit": True}}
    (tmp_path / "config.json").write_text(json.dumps(quantized))
    with pytest.raises(ConfigError, match="has a quantization_config, and quantized weights are not trained"):
        build("gpt2", GPT2, init_from=tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", **GPT2, "vocab_size": VOCAB}))
    with pytest.raises(ConfigError, match=r"holds no \.safetensors file"):
        build("gpt2", {}, init_from=tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not a file of tensors")
    with pytest.raises(ConfigError, match=r"init_from=.*: cannot be read"):
        build("gpt2", {}, init_from=tmp_path)


XLNET = {"d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 16}
XLM = {"emb_dim": 16, "n_layers": 1, "n_heads": 2}


@pytest.mark.parametrize(
    ("name", "options", "task", "cure"),
    [
        ("xlnet", XLNET, "causal_lm", "an architecture with a causal mask"),
        ("xlm", XLM, "causal_lm", "model.config.causal=true"),
        ("xlm", {**XLM, "causal": True}, "causal_lm", None),
        ("gpt2", GPT2, "causal_lm", None),
        ("llama", LLAMA, "causal_lm", None),
        ("bert", SMALL, "causal_lm", None),
        ("bert", SMALL, "masked_lm", None),
        ("t5", T5, "seq2seq_lm", None),
        ("vit", VIT, "image_classification", None),
    ],
)
def test_who_sees_the_tokens_to_predict_is_refused(name, options, task, cure):
    model, batch = build(name, options, task), inputs_of(name, 3)
    before, training = {key: value.clone() for key, value in model.state_dict().items()}, model.training
    if cure is None:
        check_causal(model, batch)
    else:
        with pytest.raises(ConfigError, match=f"model.name={name}: sees the tokens .* nearest valid: {cure}"):
            check_causal(model, batch)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert model.training == training


def test_classes_of_a_folder_are_those_of_the_data():
    config = build(
        "vit", {**VIT, "id2label": {0: "Cat", 1: "dog", **{n: f"class {n}" for n in range(2, 10)}}}
    ).model.config
    refuse_other_classes(config, {"label": ("cat", "dog")})
    refuse_other_classes(config, {"label": ("zebra", "horse")})
    with pytest.raises(ConfigError, match=r"class 1 of the model is dog, which is 0 in label of the data \(dog, cat\)"):
        refuse_other_classes(config, {"label": ("dog", "cat")})


MIXTRAL = {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2}


def checked(name, options, task=None, **rest):
    check_own_loss(build(name, options, task, **rest), inputs_of(name, 3))


@pytest.mark.parametrize(("name", "options", "task"), [*MODELS, ("mixtral", MIXTRAL, "causal_lm")])
def test_the_librarys_own_loss_is_the_one_that_is_summed(name, options, task):
    model, batch = build(name, options, task), inputs_of(name, 3)
    before = {key: value.clone() for key, value in model.state_dict().items()}, vars(model.model.config).copy()
    state = torch.random.get_rng_state()
    check_own_loss(model, batch)
    assert torch.equal(state, torch.random.get_rng_state()) and vars(model.model.config) == before[1]
    assert all(torch.equal(before[0][key], value) for key, value in model.state_dict().items())


def test_a_term_that_only_the_librarys_own_loss_has_is_refused(tmp_path):
    message = (
        "own loss of a mixtral is .*output_router_logits=True, router_aux_loss_coef=0.001: set model.config.output_r"
    )
    with pytest.raises(ConfigError, match=message):
        checked("mixtral", {**MIXTRAL, "output_router_logits": True})
    checked("mixtral", {**MIXTRAL, "output_router_logits": True, "router_aux_loss_coef": 0.0})
    build("mixtral", {**MIXTRAL, "output_router_logits": True, "router_aux_loss_coef": 0.0}).model.save_pretrained(
        tmp_path
    )
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"router_aux_loss_coef": 0.0', '"router_aux_loss_coef": 0.5'))
    with pytest.raises(ConfigError, match="router_aux_loss_coef=0.5"):
        checked("mixtral", {}, init_from=tmp_path)
    checked("mixtral", {"output_router_logits": False}, init_from=tmp_path)


@pytest.mark.parametrize(
    ("name", "options", "key"),
    [
        ("mixtral", {**MIXTRAL, "router_aux_loss_coef": 0.05}, "router_aux_loss_coef=0.05"),
        ("vit", {**VIT, "problem_type": "multi_label_classification"}, "problem_type=multi_label_classification"),
        ("switch_transformers", {"router_z_loss_coef": 0.01}, "router_z_loss_coef=0.01"),
        ("prophetnet", {"disable_ngram_loss": True}, "disable_ngram_loss=True"),
    ],
)
def test_options_that_act_in_the_librarys_own_loss_alone_are_refused(name, options, key):
    with pytest.raises(
        ConfigError, match=f"model.config.{key}: acts in transformers' own loss alone.*leave the key out"
    ):
        build(name, options)
    if name == "vit":
        build("vit", {**VIT, "problem_type": "single_label_classification"})


def test_a_folder_for_another_kind_of_problem_is_refused(tmp_path):
    source = build("vit", VIT).model
    source.config.problem_type = "regression"
    source.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="model.config.problem_type=regression: acts in transformers' own loss alone"):
        build("vit", {}, init_from=tmp_path)


ADDED = {"id": 5, "content": "[MASK]", "special": True}
TOKENIZERS = {
    "added tokens": ({"tokenizer.json": {"added_tokens": [ADDED], "model": {"vocab": {"a": 0}}}}, 5),
    "vocabulary": ({"tokenizer.json": {"added_tokens": [], "model": {"vocab": {"a": 0, "<mask>": 7}}}}, 7),
    "unigram": ({"tokenizer.json": {"model": {"vocab": [["a", 0.0], ["<mask>", 0.0]]}}}, 1),
    "named": (
        {
            "tokenizer_config.json": {"mask_token": {"content": "[GAP]"}},
            "tokenizer.json": {"added_tokens": [ADDED, {"id": 9, "content": "[GAP]"}]},
        },
        9,
    ),
    "decoder": (
        {"tokenizer_config.json": {"mask_token": "<mask>", "added_tokens_decoder": {"11": {"content": "<mask>"}}}},
        11,
    ),
    "special tokens": ({"special_tokens_map.json": {"mask_token": "[M]"}, "vocab.txt": "a\n[MASK]\nb\n[M]\n"}, 3),
    "words": ({"vocab.txt": "a\nb\n[MASK]\n"}, 2),
    "line ends": ({"vocab.txt": "a\n\u2028\n\x85\n\x0b\n[MASK]\n"}, 4),
    "nothing": ({"tokenizer.json": {"added_tokens": [], "model": {"vocab": {"a": 0}}}}, None),
}


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_the_mask_is_that_of_the_folders_tokenizer(tmp_path, kind):
    files, expected = TOKENIZERS[kind]
    build("bert", SMALL, "masked_lm").model.save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"mask_token_id"', '"other_id"'))
    for name, content in files.items():
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    if expected is None:
        with pytest.raises(
            ConfigError, match="model.mask_token: init_from holds a trained model and no tokenizer file"
        ):
            build("bert", {}, "masked_lm", init_from=tmp_path)
        expected, mask = 4, {"mask_token": 4}
    else:
        mask = {}
    model = build("bert", {}, "masked_lm", init_from=tmp_path, vocab_size=VOCAB + 1, **mask)
    assert model.mask_token == expected and model.model.config.vocab_size == VOCAB + 1


def test_the_mask_of_a_model_that_starts_from_nothing():
    assert build("bert", SMALL, "masked_lm", mask_token=3).mask_token == 3
    assert build("bert", {**SMALL, "vocab_size": VOCAB}, "masked_lm", mask_token=3).model.config.vocab_size == VOCAB
    with pytest.raises(ConfigError, match="model.mask_token=97: is no token of a vocabulary of 97"):
        build("bert", {**SMALL, "vocab_size": VOCAB}, "masked_lm", mask_token=VOCAB)
    with pytest.raises(ConfigError, match="model.mask_token: the data does not say how many tokens it has"):
        build("bert", SMALL, "masked_lm", vocab_size=None)
    with pytest.raises(ConfigError, match="model.mask_token=3: is a key of model.task=masked_lm"):
        build("gpt2", GPT2, mask_token=3)
