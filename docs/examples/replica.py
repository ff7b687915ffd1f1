"""One of several replicas that share a server: answers one prompt, says what it had not to compute.

    kvstore serve my-cache &
    python replica.py MODEL "A long prompt ..." --store my-cache --name first
    python replica.py MODEL "A long prompt ..." --store my-cache --name second

The second finds what the first has computed; so does a third on this host, whoever asks.
"""

from __future__ import annotations

import argparse

from transformers import AutoModelForCausalLM, AutoTokenizer

from kvstore.connect import connect
from kvstore.engine_adapter.transformers_adapter import TransformersAdapter


def main() -> None:
    """Answer once."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a folder or a name of the Hugging Face hub")
    parser.add_argument("prompt")
    parser.add_argument("--store", default="my-cache", help="a directory, or a kvstore:// address")
    parser.add_argument("--name", default="replica")
    parser.add_argument("--tokens", type=int, default=20)
    options = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model)
    with connect(options.store) as store:
        adapter = TransformersAdapter(store, model, writer=options.name)
        prompt = tokenizer(options.prompt, return_tensors="pt")
        cache = adapter.cache(prompt.input_ids, prompt.attention_mask)
        output = model.generate(
            prompt.input_ids, **cache.arguments(), max_new_tokens=options.tokens, do_sample=False
        )
        cache.save(output)
        prompt_tokens = prompt.input_ids.shape[1]
        print(tokenizer.decode(output[0, prompt_tokens:], skip_special_tokens=True))
        print(f"{options.name}: {cache.reused_tokens[0]} of {prompt_tokens} tokens reused")
        adapter.close()


if __name__ == "__main__":
    main()
