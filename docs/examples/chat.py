"""Chat with a model that remembers its KV across restarts. One line is one turn; an empty one ends.

    python chat.py MODEL [--store my-cache] [--history chat.json] [--tokens 60]

The history (text) lies in a file, what the model has computed for it in the store. Stop the program
after a few turns and start it again: the next turn reuses what the last process has computed.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

from kvstore.engine_adapter.transformers_adapter import TransformersAdapter


def main() -> None:
    """Answer line by line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a folder or a name of the Hugging Face hub")
    parser.add_argument("--store", default="my-cache", help="a directory, or a kvstore:// address")
    parser.add_argument("--history", type=Path, default=Path("chat.json"))
    parser.add_argument("--tokens", type=int, default=60, help="of an answer, at most")
    options = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model)
    adapter = TransformersAdapter(options.store, model)  # joins the store's server, or starts one

    history = json.loads(options.history.read_text()) if options.history.exists() else []
    for line in sys.stdin:
        if not line.strip():
            break
        history.append({"role": "user", "content": line.strip()})
        prompt = tokenizer(as_text(tokenizer, history), return_tensors="pt")
        cache = adapter.cache(prompt.input_ids, prompt.attention_mask)
        output = model.generate(
            prompt.input_ids, **cache.arguments(), max_new_tokens=options.tokens, do_sample=False
        )
        cache.save(output, durable=True)  # kept after a power cut, too
        prompt_tokens = prompt.input_ids.shape[1]
        answer = tokenizer.decode(output[0, prompt_tokens:], skip_special_tokens=True).strip()
        print(
            f"{answer}\n  [{cache.reused_tokens[0]} of {prompt_tokens} tokens reused]", flush=True
        )
        history.append({"role": "assistant", "content": answer})
        options.history.write_text(json.dumps(history))
    adapter.close()


def as_text(tokenizer: object, history: list[dict[str, str]]) -> str:
    """The conversation as the model was taught it, or as plain lines where it was not."""
    if getattr(tokenizer, "chat_template", None):
        return tokenizer.apply_chat_template(  # type: ignore[attr-defined, no-any-return]
            history, tokenize=False, add_generation_prompt=True
        )
    return "".join(f"{turn['role']}: {turn['content']}\n" for turn in history) + "assistant: "


if __name__ == "__main__":
    main()
