"""Load a saved folder with plain transformers and let it answer. Fails if a weight is missing.

python examples/generate.py outputs/smollm2/model
"""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    folder = sys.argv[1]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    problems = {key: value for key, value in info.items() if value}
    if problems:
        raise SystemExit(f"{folder} is not complete: {problems}")
    prompt = "The with statement in Python"
    inputs = tokenizer(prompt, return_tensors="pt")
    with torch.no_grad():
        tokens = model.generate(**inputs, max_new_tokens=40, do_sample=False)[0]
    text = tokenizer.decode(tokens[inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    if not text.strip():
        raise SystemExit("nothing was generated")
    print(prompt + text)


if __name__ == "__main__":
    main()
