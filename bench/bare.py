"""The bare vLLM and Megatron loops that `bench.loop` compares with; prints the rate as JSON.

* ``vllm``: the recorded prompts, all queued at once, continued by the recorded number of tokens.
* ``megatron``: mcore's model, DDP wrapper, schedule and optimizer over the recorded batches, packed the same way, with
  the plain policy-gradient sum as loss; no export, no snapshot, no metrics.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from bench.harness import Rates, rate
from libra_hpc.config.load import validate
from libra_hpc.config.run import RunConfig
from libra_hpc.protocol.codec import unpack_i32


def vllm(config: RunConfig, payload: bytes) -> float:
    """Tokens per second of vLLM alone."""
    from libra_hpc.engine.settings import EngineConfig, engine_arguments, prepare_process

    engine_config = EngineConfig(run=config)
    prepare_process(engine_config)
    from vllm import SamplingParams
    from vllm.engine.arg_utils import EngineArgs
    from vllm.outputs import RequestOutput
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.llm_engine import LLMEngine

    engine = LLMEngine.from_engine_args(EngineArgs(**engine_arguments(engine_config)))
    answers: dict[str, Any] = {"logprobs": 0, "detokenize": False, "output_kind": RequestOutputKind.FINAL_ONLY}
    for i, (prompt, length, temperature) in enumerate(msgspec.msgpack.decode(payload)):
        sampling = SamplingParams(max_tokens=length, min_tokens=length, temperature=temperature, **answers)
        engine.add_request(str(i), {"prompt_token_ids": unpack_i32(prompt)}, sampling)
    points: Rates = [(time.monotonic(), 0)]
    tokens = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            assert isinstance(output, RequestOutput)
            tokens += len(output.outputs[0].token_ids)
        points.append((time.monotonic(), tokens))
    return rate(points)


def megatron(config: RunConfig, payload: bytes) -> float:
    """Trained tokens per second of mcore alone."""
    import torch

    from libra_hpc.models.architecture import read_shape
    from libra_hpc.protocol.agents import Batch
    from libra_hpc.trainer.device import choose_device, local_store
    from libra_hpc.trainer.model import compat
    from libra_hpc.trainer.model.head import Head
    from libra_hpc.trainer.model.mcore import get_forward_backward_func
    from libra_hpc.trainer.model.packing import Pack, decode, pack
    from libra_hpc.trainer.saved.checkpoint import load_policy
    from libra_hpc.trainer.train_engine import TrainEngine, init_world

    device = choose_device("cpu", 0, config.train.threads)
    split = init_world(device, tp=1, pp=1, rank=0, store=local_store(), timeout_s=60.0)
    path = Path(config.model.path)
    engine = TrainEngine(
        read_shape(path), device, torch.float32, split, settings=config.optimizer, updates=config.updates
    )
    load_policy(engine, path)
    batches = msgspec.msgpack.decode(payload, type=list[Batch])
    run = get_forward_backward_func()
    model, optimizer = engine.ddp, engine._optimizer
    zero = torch.zeros((), dtype=torch.int)

    def forward(iterator: Any, module: Any) -> Any:
        one: Pack = next(iterator)
        hidden = module(one.tokens, one.positions, None, packed_seq_params=engine.layout(one))

        def loss(output: Any) -> Any:
            logprobs = Head(model.module, output[0], one.where).likelihood(one.targets, 1.0).logprobs
            return -(logprobs * one.advantages).sum(), zero, {}

        return hidden, loss

    points: Rates = [(time.monotonic(), 0)]
    tokens = 0
    for batch in sorted(batches, key=lambda b: b.step):
        samples = [s for g in batch.groups for s in g.samples if s.advantage != 0.0]
        packs = pack([decode(s) for s in samples], config.train.micro_tokens, device)
        model.zero_grad_buffer()
        optimizer.zero_grad()
        with compat.mcore_device():
            if packs:
                run(
                    forward_step_func=forward,
                    data_iterator=iter(packs),
                    model=[model],
                    num_microbatches=len(packs),
                    seq_length=max(p.tokens.shape[1] for p in packs),
                    micro_batch_size=1,
                    forward_only=False,
                )
            model.scale_gradients(1.0 / max(1, sum(len(p.targets) for p in packs)))
            optimizer.step()
        tokens += sum(p.tokens.shape[1] for p in packs)
        points.append((time.monotonic(), tokens))
    return rate(points)


def main() -> None:
    """``bare.py vllm|megatron CONFIG_JSON PAYLOAD``"""
    part, config, payload = sys.argv[1], validate(json.loads(sys.argv[2])), Path(sys.argv[3]).read_bytes()
    print({"vllm": vllm, "megatron": megatron}[part](config, payload), flush=True)


if __name__ == "__main__":
    main()
