"""Make smollm2_reference.json: greedy ids of SmolLM2-135M-Instruct (GGUF) by transformers in float32.

    python -m tests.data.make_smollm2_reference .cache/models/SmolLM2-135M-Instruct.Q4_1.gguf

transformers itself reads and dequantises the file, so nothing of Limpet takes part in the ids.
"""

import argparse
from pathlib import Path

import msgspec
import torch
import transformers
from rich.progress import track
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.aids.reference import SMOLLM2_REFERENCE, ReferenceFile, ReferencePrompt
from tests.aids.transformers_reference import greedy_reference

NUM_TOKENS = 48

CHATS = {
    "capital": "What is the capital of France?",
    "one-word": "Hi",
    "chinese-chat": "请用中文介绍一下北京。",
    "code-chat": "Write a Python function that returns the n-th Fibonacci number.",
    "list": "List five fruits, one per line.",
    "arithmetic": "What is 17 + 25? Think step by step.",
    "emoji": "What does 🎉🚀 mean?",
    "translate": 'Translate to French: "The cat sleeps on the chair."',
    "json": 'Return a JSON object with the keys "name" and "age" for a person called Ada who is 36.',
    "story": "Tell me a story about a limpet that comes back to its place on the rock at every tide.",
}
PARAGRAPH = (
    "The tide pool lay between two shelves of dark rock, and twice a day the sea filled it and left again. When the "
    "water went down, the anemones closed, the crabs went under the weed, and the limpets settled on the marks that "
    "their own shells had worn into the stone. "
)
RAW = {
    "one-token": "The",
    "newline": "\n",
    "sentence": "Once upon a time, in a village by the sea, there lived",
    "leading-spaces": "    return",
    "code": "def quicksort(values):\n    if len(values) <= 1:\n        return values\n    pivot = values[0]\n",
    "chinese": "人工智能是计算机科学的一个分支,",
    "numbers": "1, 2, 3, 5, 8, 13,",
    "brackets": "<html>\n<head>\n<title>",
    "paragraph": PARAGRAPH,
    "long": PARAGRAPH * 5 + "In short,",
}


def make(gguf: Path) -> ReferenceFile:
    """Generate all references; takes minutes on two cores."""
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    prompts = [(name, text, True) for name, text in CHATS.items()] + [(name, text, False) for name, text in RAW.items()]
    made = []
    for name, text, is_chat in track(prompts, description="Reference ids"):
        chat = [{"role": "user", "content": text}]
        rendered = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) if is_chat else text
        prompt = tokenizer.encode(rendered, add_special_tokens=False)
        reference = greedy_reference(model, prompt, NUM_TOKENS)
        made.append(ReferencePrompt(name=name, text=text, is_chat=is_chat, prompt=prompt, reference=reference))
    return ReferenceFile(
        model=gguf.name, transformers=transformers.__version__, torch=str(torch.__version__), prompts=made
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", type=Path)
    made = make(parser.parse_args().gguf)
    one_prompt_a_line = msgspec.json.encode(made).replace(b'{"name"', b'\n{"name"')
    SMOLLM2_REFERENCE.write_bytes(one_prompt_a_line + b"\n")


if __name__ == "__main__":
    main()
