"""Every flag of a run: two command lines that differ in it alone, and the first facet (tests/effects/look.py) in which
the runs differ.

The first command line is the base with `given`; the second adds `words`. Several rows of a flag try several values.
Flags that need a GPU or another backend (--device cuda, --cuda-graphs, --optimizer-impl apex, --backend nccl and mpi)
are refused by name on a machine without it, and only this is compared here. The rest is in tests/gpu and
tests/zero/test_apex.py. For FP8 the state is compared here, and its results in tests/parity/test_fp8.py.
"""

from __future__ import annotations

from typing import NamedTuple

MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 8 --make-vocab-size-divisible-by 8 "
    "--device cpu"
)
LENGTH = "--global-batch-size 4 --micro-batch-size 2 --eval-iters 1 --num-workers 0 --precision fp32 --train-iters 3"
DATA = "--data-path {corpus} --vocab-size 1003 --split 80,10,10 --data-cache-path {cache}"
CHATS = "--instruction-data {talks} --tokenizer byte --seq-length 24 --data-cache-path {cache}"
BASES = {
    "text": f"{MODEL} {LENGTH} {DATA}",
    "chats": f"{MODEL} {LENGTH} {CHATS}",
    "ranks": f"{MODEL} {LENGTH} {DATA} --num-layers 4",
}
"""Of one rank, of one rank on conversations, of two ranks."""


class Row(NamedTuple):
    """field: the flag's. shows: the first facet that differs."""

    field: str
    words: str
    shows: str
    given: str = ""
    base: str = "text"


ALIBI_LESS, DYNAMIC, OVERFLOWS = (
    "--position-embedding learned",
    "--precision fp16",
    "--precision fp16 --initial-loss-scale 1e30",
)
SAMPLES, DECAYS = (
    "--train-iters none --train-samples 12",
    "--train-iters none --train-samples 12 --lr-decay-style linear",
)
SPEAKS = "--tokenizer byte --sample-prompt ab --sample-tokens 5"
READS = "--tokenizer gpt2 --tokenizer-path {bpe} --sample-prompt ab"
INT8 = "--zero-quantized-gradients int8"
SAVES, LOADS = "--save {out}/saved --save-interval 1", "--load {kept}"
SEARCHES = "--placement auto --placement-rates {rates} --precision bf16"
ADAPTS = "--init-from {kept} --lora-rank 2"

ROWS = (
    # the model
    Row("num_layers", "--num-layers 3", "parameters"),
    Row("hidden_size", "--hidden-size 64", "parameters"),
    Row("num_attention_heads", "--num-attention-heads 4", "loss"),
    Row("num_query_groups", "--num-query-groups 1", "parameters"),
    Row("kv_channels", "--kv-channels 4", "parameters"),
    Row("ffn_hidden_size", "--ffn-hidden-size 48", "parameters"),
    Row("vocab_size", "--vocab-size 1005", "parameters"),
    Row("make_vocab_size_divisible_by", "--make-vocab-size-divisible-by 100", "parameters"),
    Row("seq_length", "--seq-length 9", "samples"),
    Row("max_position_embeddings", "--max-position-embeddings 20", "parameters", ALIBI_LESS),
    Row("position_offset", "--position-offset 2", "parameters", ALIBI_LESS),
    Row("position_embedding", "--position-embedding learned", "parameters"),
    Row("position_embedding", "--position-embedding rotary", "loss", "--position-embedding none"),
    Row("rotary_base", "--rotary-base 5", "loss", "--position-embedding rotary"),
    Row("embedding_layernorm", "--no-embedding-layernorm", "parameters"),
    Row("norm", "--norm rmsnorm", "parameters"),
    Row("norm_epsilon", "--norm-epsilon 0.5", "loss"),
    Row("activation", "--activation relu", "loss"),
    Row("activation", "--activation swiglu", "parameters"),
    Row("untie_embeddings_and_output_weights", "--untie-embeddings-and-output-weights", "parameters"),
    Row("disable_bias_linear", "--disable-bias-linear", "parameters"),
    Row("attention_bias", "--no-attention-bias", "parameters"),
    Row("mlp_bias", "--no-mlp-bias", "parameters"),
    Row("hidden_dropout", "--hidden-dropout 0.5", "loss"),
    Row("attention_dropout", "--attention-dropout 0.9", "loss", "--attention softmax"),
    Row("init_method_std", "--init-method-std 0.1", "start"),
    Row("document_mask", "--document-mask", "masks", "--eod-id 0"),
    # the layout
    Row("tp", "--tp 2", "parameters", base="ranks"),
    Row("pp", "--pp 2", "parameters", base="ranks"),
    Row("zero_stage", "--zero-stage 1", "memory", base="ranks"),
    Row("zero_stage", "--zero-stage 2", "memory", "--zero-stage 1", base="ranks"),
    Row("zero_stage", "--zero-stage 3", "buckets", "--zero-stage 2", base="ranks"),
    Row("zero3_regather", "--zero3-regather step", "schedule", "--zero-stage 3", base="ranks"),
    Row("zero_shard_size", "--zero-shard-size 1", "memory", "--zero-stage 1", base="ranks"),
    Row("zero_shard_size", "--zero-shard-size 2", "memory", "--zero-stage 1 --zero-shard-size 1", base="ranks"),
    Row(
        "zero_quantized_weights",
        "--zero-quantized-weights",
        "traffic",
        f"{INT8} --precision bf16 --zero-stage 1",
        base="ranks",
    ),
    Row("zero_quantized_weights", "--zero-quantized-weights", "memory", f"{INT8} --zero-stage 2", base="ranks"),
    Row("zero_quantized_weights", "--zero-quantized-weights", "buckets", "--zero-stage 3", base="ranks"),
    Row("zero_quantized_gradients", "--zero-quantized-gradients int8", "buckets", base="ranks"),
    Row("zero_quantized_gradients", "--zero-quantized-gradients int4", "traffic", INT8, base="ranks"),
    Row("zero_gradient_error_feedback", "--zero-gradient-error-feedback", "memory", INT8, base="ranks"),
    Row("zero3_gathered_bytes", "--zero3-gathered-bytes 135000", "schedule", "--zero-stage 3", base="ranks"),
    Row("zero3_persist_below", "--zero3-persist-below 100", "buckets", "--zero-stage 3", base="ranks"),
    Row("pipeline_schedule", "--pipeline-schedule gpipe", "schedule", "--pp 2", base="ranks"),
    Row("pipeline_schedule", "--pipeline-schedule zb-h1", "schedule", "--pp 2", base="ranks"),
    Row("virtual_stages", "--virtual-stages 2", "parameters", "--pp 2", base="ranks"),
    Row("partition", "--partition 3,1", "parameters", "--pp 2", base="ranks"),
    Row("partition_by", "--partition-by time", "parameters", "--pp 2", base="ranks"),
    Row("sequence_parallel", "--sequence-parallel", "schedule", "--tp 2", base="ranks"),
    Row("recompute_granularity", "--recompute-granularity selective", "attention"),
    Row("recompute_granularity", "--recompute-granularity full", "attention"),
    Row("offload_activations", "--offload-activations cpu", "schedule"),
    Row("offload_activations", "--offload-activations cpu:0.5", "schedule", "--offload-activations cpu"),
    Row("offload_activations", "--offload-activations cpu", "schedule", "--pp 2", base="ranks"),
    Row("offload_activations", "--offload-activations nvme --nvme-path {out}", "schedule"),
    Row("offload_activations", "--offload-activations files --files-path {out}", "schedule"),
    Row("activation_memory_budget", "--activation-memory-budget 50KB", "attention"),
    Row("device_memory_budget", "--device-memory-budget 50KB", "refused"),
    Row("host_memory_budget", "--host-memory-budget 50KB", "refused", "--offload-optimizer cpu"),
    Row(
        "shard_recompute_inputs",
        "--shard-recompute-inputs",
        "traffic",
        "--tp 2 --recompute-granularity full",
        base="ranks",
    ),
    Row("recompute_num_layers", "--recompute-num-layers 2", "attention", "--recompute-granularity full"),
    Row("overlap", "--no-overlap", "schedule", "--bucket-size 5000", base="ranks"),
    Row("late_update", "--late-update", "schedule"),
    Row("early_update", "--early-update", "schedule", "--offload-optimizer nvme --nvme-path {out}"),
    Row("late_update", "--late-update", "schedule", "--zero-stage 3", base="ranks"),
    Row("micro_batch_order", "--micro-batch-order vertical", "schedule"),
    Row(
        "micro_batch_order",
        "--micro-batch-order vertical",
        "schedule",
        "--zero-stage 3 --micro-batch-size 1",
        base="ranks",
    ),
    Row(
        "micro_batch_order",
        "--micro-batch-order horizontal",
        "schedule",
        "--offload-params nvme --nvme-path {out} --micro-batch-size 1",
    ),
    Row("vertical_group_size", "--vertical-group-size 1", "schedule", "--micro-batch-order vertical"),
    Row("offload_params", "--offload-params cpu", "memory", "--zero-stage 3"),
    Row("offload_params", "--offload-params cpu:0.2", "memory", "--offload-params cpu"),
    Row("offload_params", "--offload-params nvme --nvme-path {out}", "buckets", "--precision bf16"),
    Row("offload_gradients", "--offload-gradients cpu", "memory"),
    Row("offload_gradients", "--offload-gradients cpu:0.2", "memory", "--offload-gradients cpu --bucket-size 5000"),
    Row("offload_gradients", "--offload-gradients nvme --nvme-path {out}", "memory", "--offload-gradients cpu"),
    Row("offload_optimizer", "--offload-optimizer cpu", "memory"),
    Row("offload_optimizer", "--offload-optimizer cpu:0.5", "memory", "--offload-optimizer cpu"),
    Row("offload_optimizer", "--offload-optimizer nvme --nvme-path {out}", "memory", "--precision bf16"),
    Row("offload_optimizer", "--offload-optimizer files --files-path {out}", "memory", "--precision bf16"),
    Row("offload_params", "--offload-params files --files-path {out}", "buckets", "--precision bf16"),
    Row("offload_gradients", "--offload-gradients files --files-path {out}", "memory", "--offload-gradients cpu"),
    Row("placement", "--placement {table}", "memory"),
    Row("placement_rates", "--placement-rates {slow}", "buckets", SEARCHES),
    Row("device_memory_budget", "--device-memory-budget 1MB", "buckets", f"{SEARCHES} --host-memory-budget 100MB"),
    Row("host_memory_budget", "--host-memory-budget 9KB", "refused", f"{SEARCHES} --device-memory-budget 1MB"),
    Row("nvme_path", "--nvme-path {out}/absent", "refused", "--offload-optimizer nvme --nvme-path {out}"),
    Row("files_path", "--files-path {out}/absent", "refused", "--offload-optimizer files --files-path {out}"),
    Row(
        "nvme_checkpoint",
        "--nvme-checkpoint",
        "files",
        "--offload-optimizer nvme --nvme-path {out} --exit-interval 2",
    ),
    Row("nvme_buffer_bytes", "--nvme-buffer-bytes 200KB", "memory", "--offload-gradients cpu"),
    Row("compile", "--compile", "compiled", "--precision fp64"),
    Row("attention", "--attention softmax", "attention", "--attention flash --position-embedding rotary"),
    Row("cuda_graphs", "--cuda-graphs", "refused"),
    Row("bucket_size", "--bucket-size 500", "buckets"),
    Row("grad_reduce_dtype", "--grad-reduce-dtype bf16", "traffic", "--precision bf16", base="ranks"),
    Row("device", "--device cuda", "refused"),
    Row("backend", "--backend nccl", "refused", base="ranks"),
    Row("backend", "--backend mpi", "refused", base="ranks"),
    Row("shared_memory", "--no-shared-memory", "carrier", base="ranks"),
    Row("distributed_timeout_minutes", "--distributed-timeout-minutes 3", "world", base="ranks"),
    # the optimizer
    Row("precision", "--precision bf16", "parameters"),
    Row("precision", "--precision fp64", "parameters"),
    Row("fp8", "--fp8 current", "history", "--precision bf16"),
    Row("fp8", "--fp8 delayed", "history", "--precision bf16 --fp8 current"),
    Row("fp8_amax_history", "--fp8-amax-history 2", "history", "--precision bf16 --fp8 delayed"),
    Row("optimizer", "--optimizer sgd", "memory"),
    Row("optimizer", "--optimizer adam", "weights"),
    Row("optimizer_impl", "--optimizer-impl apex", "refused"),
    Row("weight_decay", "--weight-decay 0.5", "weights"),
    Row("adam_beta1", "--adam-beta1 0.5", "weights"),
    Row("adam_beta2", "--adam-beta2 0.5", "weights"),
    Row("adam_eps", "--adam-eps 1e-3", "weights"),
    Row("sgd_momentum", "--sgd-momentum 0.5", "weights", "--optimizer sgd"),
    Row("ema_decay", "--ema-decay 0.5", "memory", SAVES),
    Row("ema_decay", "--ema-decay 0.5", "averages", f"{SAVES} --ema-decay 0.9"),
    Row("clip_grad", "--clip-grad 0.01", "weights", "--optimizer sgd"),
    Row("label_smoothing", "--label-smoothing 0.2", "loss"),
    Row("z_loss", "--z-loss 0.1", "loss"),
    Row("loss_scale", "--loss-scale 8", "scales", DYNAMIC),
    Row("initial_loss_scale", "--initial-loss-scale 1024", "scales", DYNAMIC),
    Row("loss_scale_window", "--loss-scale-window 1", "scales", DYNAMIC),
    Row("hysteresis", "--hysteresis 1", "scales", OVERFLOWS),
    Row("min_loss_scale", "--min-loss-scale 1e30", "scales", f"{OVERFLOWS} --hysteresis 1 --max-skipped-steps 0"),
    Row("max_skipped_steps", "--max-skipped-steps 2", "refused", f"{OVERFLOWS} --min-loss-scale 1e30"),
    # how long, and how fast
    Row("micro_batch_size", "--micro-batch-size 1", "samples"),
    Row("global_batch_size", "--global-batch-size 8", "samples"),
    Row("rampup_batch_size", "--rampup-batch-size 2 2 4", "samples"),
    Row("train_length", "--train-iters 4", "samples"),
    Row("train_length", "--train-samples 8", "samples", SAMPLES),
    Row("train_length", "--epochs 0.02", "samples", "--train-iters none --epochs 0.01"),
    Row("lr", "--lr 1e-2", "rates"),
    Row("min_lr", "--min-lr 1e-4", "rates"),
    Row("lr_decay_style", "--lr-decay-style linear", "rates"),
    Row("lr_warmup", "--lr-warmup 2", "rates"),
    Row("lr_warmup", "--lr-warmup 50%", "rates"),
    Row("lr_warmup", "--lr-warmup-iters 2", "rates"),
    Row("lr_warmup", "--lr-warmup-samples 8", "rates", SAMPLES),
    Row("lr_warmup", "--lr-warmup-fraction 0.5", "rates"),
    Row("lr_decay", "--lr-decay 2 iterations", "rates"),
    Row("lr_decay", "--lr-decay-iters 2", "rates"),
    Row("lr_decay", "--lr-decay-samples 8", "rates", DECAYS),
    Row("lr_wsd_decay", "--lr-wsd-decay-iters 2", "rates", "--lr-decay-style wsd"),
    Row("lr_wsd_decay", "--lr-wsd-decay-samples 8", "rates", f"{SAMPLES} --lr-decay-style wsd"),
    # data
    Row("data_path", "--data-path {other}", "samples"),
    Row("split", "--split 20,80,0", "samples"),
    Row("valid_data_path", "--valid-data-path elsewhere {other}", "evaluations"),
    Row("instruction_data", "--instruction-data {more_talks}", "samples", base="chats"),
    Row("valid_instruction_data", "--valid-instruction-data {more_talks}", "evaluations", base="chats"),
    Row("long_conversations", "--long-conversations drop", "refused", "--instruction-data {long_talks}", base="chats"),
    Row(
        "long_conversations",
        "--long-conversations truncate",
        "samples",
        "--instruction-data {long_talks} --long-conversations drop",
        base="chats",
    ),
    Row("tokenizer", "--tokenizer hf", "text", READS),
    Row("tokenizer_path", "--tokenizer-path {other_bpe}", "text", READS),
    Row("eod_id", "--eod-id 5", "masks", "--eod-id 0 --document-mask"),
    Row("eod_mask_loss", "--eod-mask-loss", "masks", "--eod-id 0"),
    Row("data_cache_path", "--data-cache-path {out}/cache", "files"),
    Row("num_workers", "--num-workers 1", "threads"),
    Row("seed", "--seed 7", "start"),
    Row("seed", "--seed 7", "samples", "--init-from {kept}"),
    # checkpoints
    Row("save", "--save {out}/saved", "saves"),
    Row("load", "--load {kept}", "start"),
    Row("save_interval", "--save-interval 2", "saves", "--save {out}/saved"),
    Row("keep_last", "--keep-last-k 1", "files", SAVES),
    Row("save_retain_interval", "--save-retain-interval 2", "files", f"{SAVES} --keep-last-k 1"),
    Row("async_save", "--async-save", "saves", SAVES),
    Row("no_save_optim", "--no-save-optim", "kept", SAVES),
    Row("init_from", "--init-from {kept}", "start"),
    Row("extend_vocabulary", "--extend-vocabulary", "refused", "--init-from {kept} --vocab-size 1010"),
    Row("finetune", "--finetune", "moments", LOADS),
    Row("no_load_optim", "--no-load-optim", "moments", LOADS),
    Row("override_opt_param_scheduler", "--override-opt-param-scheduler", "refused", f"{LOADS} --lr 5e-3"),
    Row("override_batch", "--override-batch", "refused", f"{LOADS} --global-batch-size 8"),
    Row("override_data", "--override-data", "refused", f"{LOADS} --seed 7"),
    Row("vocab_size", "--vocab-size 1020", "parameters", "--init-from {kept} --extend-vocabulary --vocab-size 1010"),
    Row("lr", "--lr 5e-3", "rates", f"{LOADS} --override-opt-param-scheduler"),
    Row("global_batch_size", "--global-batch-size 8", "samples", f"{LOADS} --override-batch"),
    Row("seed", "--seed 7", "samples", f"{LOADS} --override-data"),
    Row("ckpt_probe", "--no-ckpt-probe", "kept", SAVES),
    # the loop
    Row("eval_interval", "--eval-interval 1", "evaluations"),
    Row("eval_at_start", "--eval-at-start", "evaluations"),
    Row("eval_iters", "--eval-iters 2", "evaluations"),
    Row("test_iters", "--test-iters 1", "evaluations"),
    Row("exit_interval", "--exit-interval 2", "samples"),
    Row("exit_duration_in_mins", "--exit-duration-in-mins 1e-9", "samples"),
    Row("log_interval", "--log-interval 3", "logged"),
    Row("metrics_file", "--metrics-file {out}/metrics.jsonl", "files"),
    Row("memory_trace", "--memory-trace {out}/step.html", "files"),
    Row("report_json", "--report-json {out}/report.json", "files"),
    Row("sinks", "--sinks nowhere", "refused"),
    Row("wandb", "--wandb poems", "services"),
    Row("wandb_group", "--wandb-group small", "services", "--wandb poems"),
    Row("mlflow", "--mlflow poems", "services"),
    Row("tensorboard_dir", "--tensorboard-dir {out}/board", "files"),
    Row("sample_prompt", "--sample-prompt cd", "text", SPEAKS),
    Row("sample_tokens", "--sample-tokens 7", "text", SPEAKS),
    Row("deterministic", "--deterministic", "process"),
    # adapters
    Row("lora_rank", "--lora-rank 2", "parameters", "--init-from {kept}"),
    Row("lora_alpha", "--lora-alpha 1", "norm", ADAPTS),
    Row("lora_targets", "--lora-targets qkv", "parameters", ADAPTS),
    Row("lora_dropout", "--lora-dropout 0.9", "norm", ADAPTS),
    Row("lora_base_bits", "--lora-base-bits 4", "memory", ADAPTS),
    Row("lora_base_qkv", "--lora-base-qkv three", "memory", f"{ADAPTS} --lora-base-bits 4"),
)
