"""A loop that answers prompts in batches as they come in.

The first argument is the folder of a Hugging Face model. Without one, a tiny model of the tests is
taken.
"""

import queue
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from models.generation import Generator, Sampling
from models.hugging_face import ModelFolder, load

TINY = Path(__file__).parents[2] / "tests/data/hugging_face/llama3"
BATCH = 4


class Request(NamedTuple):
    """A prompt, and where the tokens of its answer go. None ends the answer."""

    prompt: list[int]
    send: Callable[[int | None], object]


# [batch]
def next_batch(requests: queue.Queue[Request | None]) -> list[Request]:
    """Waits for a request, and takes those that are there already. An empty batch ends the loop."""
    batch, request = [], requests.get()
    while request is not None:
        batch.append(request)
        if len(batch) == BATCH or requests.empty():
            return batch
        request = requests.get()
    if batch:
        requests.put(None)  # for the next call
    return batch


# [serve]
def serve(folder: ModelFolder, requests: queue.Queue[Request | None]) -> None:
    """Answers requests until it gets None."""
    generator = Generator(folder.config)  # all devices that the model fits, bfloat16
    params = load(folder, generator.abstract_params)
    while batch := next_batch(requests):
        # A batch of one size needs one program for each padded length; the last prompt fills it.
        padding = [batch[-1]] * (BATCH - len(batch))
        generator(
            params,
            [request.prompt for request in batch + padding],
            max_new_tokens=12,
            sampling=Sampling(temperature=0.7, seed=1),
            stop_tokens=folder.stop_tokens,
            tokens_per_launch=4,
            on_token=lambda n, token, batch=batch: n < len(batch) and batch[n].send(token),
        )
        for request in batch:
            request.send(None)


# [run]
if __name__ == "__main__":
    folder = ModelFolder(sys.argv[1] if len(sys.argv) > 1 else str(TINY))
    requests: queue.Queue[Request | None] = queue.Queue()
    server = threading.Thread(target=serve, args=(folder, requests))
    server.start()
    answers: list[queue.Queue[int | None]] = [queue.Queue() for _ in range(6)]
    for number, answer in enumerate(answers):
        requests.put(Request([1, 2, 3 + number], answer.put))
    for number, answer in enumerate(answers):
        print(f"prompt {number}:", *iter(answer.get, None))
    requests.put(None)
    server.join()
