"""En.QA: questions about a novel (SCBench, section 3; its texts come from its own file)."""

from __future__ import annotations

from criticalkv.services.evaluation.example import Question

TASK = "en_qa"
INSTRUCTION = "Read the book and answer the question. Be very concise in your answer.\n\n"
MAX_TOKENS = 40


def ask(text: str, answers: tuple[str, ...]) -> Question:
    """Return a question with its right answers, as the benchmark puts and judges it."""
    return Question(f"Question: {text}\nAnswer:", answers, "answer_match", MAX_TOKENS)
