"""The paper's experiment: GPT-2 with LoRA learns AG News as a stream of tasks, with several methods."""
