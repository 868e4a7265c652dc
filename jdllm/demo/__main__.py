"""`python -m jdllm.demo`: the bundled model answers one unseen instance of each of its tasks."""

from jdllm import LLM, SamplingParams
from jdllm.cli.compiling import told_of_compiling
from jdllm.demo import checkpoint_path
from jdllm.demo.tasks import GEN_LENGTH, TASKS, test_instances


def main() -> None:
    """Generate all answers in one batch and print them beside their prompts."""
    llm = LLM(checkpoint_path(), dtype="float32")
    prompts = [next(iter(test_instances(name, 1, seed=5))).prompt for name in TASKS]
    with told_of_compiling():
        outputs = llm.generate(prompts, SamplingParams(gen_length=GEN_LENGTH), progress=True)
    for output in outputs:
        print(f"{output.prompt} \N{RIGHTWARDS ARROW} {output.text}")
    print(f"[{len(prompts)} prompts at once, {outputs[0].nfe} steps, {outputs[0].timings.running:.1f} s]")


if __name__ == "__main__":
    main()
