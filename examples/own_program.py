#!/usr/bin/env python3
"""A program that pretrains a model on its own data in its own loop. Start it with `python` or with `torchrun`."""

import megazero

SETTINGS = {
    "model": {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 64, "vocab_size": 128},
    "schedule": {"train_iters": 100, "global_batch_size": 8, "lr": 0.003},
    "trainer": {"eval_interval": 50, "eval_iters": 2, "log_interval": 10},
    "checkpoint": {"save": "checkpoints/own", "load": "checkpoints/own", "save_interval": 50},
}


class Lines:
    """Pieces of a text: item i is 65 token ids, of which the first 64 are inputs and the last 64 labels."""

    def __init__(self, text: str) -> None:
        self.ids = list(text.encode())

    def __len__(self) -> int:
        return (len(self.ids) - 1) // 64

    def __getitem__(self, index: int) -> list[int]:
        return self.ids[64 * index : 64 * index + 65]


def main() -> None:
    text = "".join(f"{a} + {a * a % 89} = {a + a * a % 89}\n" for a in range(5000))
    data, held_out = Lines(text[:-2000]), Lines(text[-2000:])
    with megazero.training(SETTINGS, train_data=data, valid_data=held_out) as run:
        for step in run.steps():
            if step.iteration % 10 == 0 and float(step.loss) < 0.7:
                run.stop("the loss is low enough")
    if run.rank == 0:
        print(run.result)


if __name__ == "__main__":
    main()
