"""LongBench's prompts, cut where the context ends that is compressed.

Wordings, lengths of answers and metrics are LongBench's own (arXiv 2308.14508,
dataset2prompt.json, dataset2maxlen.json, eval.py); context, question and the beginning of
the answer are cut as in kvpress, with which the CriticalKV paper measured (arXiv
2502.03805, Tables 17–22): an instruction that stands between context and question is
compressed with the context, and the last words of a prompt begin the assistant's answer.
LongBench leaves the chat template out for few-shot and code tasks; here, as in kvpress, it
is always there.
"""

from __future__ import annotations

from dataclasses import dataclass

CONTEXT, INPUT = "{context}", "{input}"

_STORY = (
    "the question {0}as concisely as you can, using a single phrase if possible. "
    "Do not provide any explanation.\n\n"
)
_ARTICLE = (
    "as concisely as you can, using a single phrase or sentence if possible. If the question "
    'cannot be answered based on the information in the article, write "unanswerable". If the '
    'question is a yes/no question, answer "yes", "no", or "unanswerable". Do not provide any '
    "explanation.\n\n"
)
_PASSAGES = (
    "Answer the question based on the given passages. Only give me the answer and do not output "
    "any other words.\n\n"
)


@dataclass(frozen=True)
class Template:
    """A task's prompt and how its answer is judged.

    Attributes:
        context: compressed; `{context}` is the row's.
        question: asked afterwards; `{input}` is the row's.
        answer_prefix: how the answer begins.
        max_tokens: most tokens of an answer.
        metric: name in `metrics.METRICS`.
        ends_input: the row's input ends with the answer's prefix, instead of the prompt.
    """

    context: str
    question: str
    answer_prefix: str
    max_tokens: int
    metric: str
    ends_input: bool = False

    def render(self, context: str, input_: str) -> tuple[str, str, str]:
        """Return a row's context, question and answer prefix: joined, LongBench's prompt."""
        prefix = self.answer_prefix
        if self.ends_input:
            prefix = prefix if input_.endswith(prefix) else ""
            input_ = input_.removesuffix(prefix)
        return _fill(self.context, CONTEXT, context), _fill(self.question, INPUT, input_), prefix


def _fill(template: str, name: str, value: str) -> str:
    before, mark, after = template.partition(name)
    return before + (value if mark else "") + after


_MULTI_DOCUMENT = Template(
    _PASSAGES + f"The following are given passages.\n{CONTEXT}\n\n" + _PASSAGES,
    f"Question: {INPUT}\n",
    "Answer:",
    32,
    "qa_f1",
)
TEMPLATES = {
    "narrativeqa": Template(
        "You are given a story, which can be either a novel or a movie script, and a question. "
        "Answer " + _STORY.format("") + f"Story: {CONTEXT}\n\n"
        "Now, answer " + _STORY.format("based on the story "),
        f"Question: {INPUT}\n\n",
        "Answer:",
        128,
        "qa_f1",
    ),
    "qasper": Template(
        f"You are given a scientific article and a question. Answer the question {_ARTICLE}"
        f"Article: {CONTEXT}\n\n Answer the question based on the above article {_ARTICLE}",
        f"Question: {INPUT}\n\n",
        "Answer:",
        128,
        "qa_f1",
    ),
    "multifieldqa_en": Template(
        f"Read the following text and answer briefly.\n\n{CONTEXT}\n\nNow, answer the following "
        "question based on the above text, only give me the answer and do not output any other "
        "words.\n\n",
        f"Question: {INPUT}\n",
        "Answer:",
        64,
        "qa_f1",
    ),
    "hotpotqa": _MULTI_DOCUMENT,
    "2wikimqa": _MULTI_DOCUMENT,
    "musique": _MULTI_DOCUMENT,
    "gov_report": Template(
        "You are given a report by a government agency. Write a one-page summary of the report."
        f"\n\nReport:\n{CONTEXT}\n\n",
        "Now, write a one-page summary of the report.\n\n",
        "Summary:",
        512,
        "rouge_l",
    ),
    "qmsum": Template(
        "You are given a meeting transcript and a query containing a question or instruction. "
        f"Answer the query in one or more sentences.\n\nTranscript:\n{CONTEXT}\n\nNow, answer the "
        "query based on the above meeting transcript in one or more sentences.\n\n",
        f"Query: {INPUT}\n",
        "Answer:",
        512,
        "rouge_l",
    ),
    "multi_news": Template(
        "You are given several news passages. Write a one-page summary of all news. \n\nNews:\n"
        f"{CONTEXT}\n\n",
        "Now, write a one-page summary of all the news.\n\n",
        "Summary:",
        512,
        "rouge_l",
    ),
    "trec": Template(
        "Please determine the type of the question below. Here are some examples of questions."
        f"\n\n{CONTEXT}\n",
        INPUT,
        "Type:",
        64,
        "classification_first_line",
        ends_input=True,
    ),
    "triviaqa": Template(
        "Answer the question based on the given passage. Only give me the answer and do not "
        f"output any other words. The following are some examples.\n\n{CONTEXT}\n\n",
        INPUT,
        "Answer:",
        32,
        "qa_f1_first_line",
        ends_input=True,
    ),
    "samsum": Template(
        "Summarize the dialogue into a few short sentences. The following are some examples.\n\n"
        f"{CONTEXT}\n\n",
        INPUT,
        "Summary:",
        128,
        "rouge_l_first_line",
        ends_input=True,
    ),
    "passage_count": Template(
        "There are some paragraphs below sourced from Wikipedia. Some of them may be duplicates. "
        "Please carefully read these paragraphs and determine how many unique paragraphs there "
        "are after removing duplicates. In other words, how many non-repeating paragraphs are "
        f"there in total?\n\n{CONTEXT}\n\n",
        "Please enter the final count of unique paragraphs after removing duplicates. The output "
        "format should only contain the number, such as 1, 2, 3, and so on.\n\n",
        "The final answer is: ",
        32,
        "count",
    ),
    "passage_retrieval_en": Template(
        "Here are 30 paragraphs from Wikipedia, along with an abstract. Please determine which "
        f"paragraph the abstract is from.\n\n{CONTEXT}\n\nThe following is an abstract.\n\n",
        f"{INPUT}\n\nPlease enter the number of the paragraph that the abstract is from. The "
        'answer format must be like "Paragraph 1", "Paragraph 2", etc.\n\n',
        "The answer is: ",
        32,
        "retrieval",
    ),
    "lcc": Template(
        f"Please complete the code given below. \n{CONTEXT}",
        "",
        "Next line of code:\n",
        64,
        "code_similarity",
    ),
    "repobench-p": Template(
        f"Please complete the code given below. \n{CONTEXT}",
        INPUT,
        "Next line of code:\n",
        64,
        "code_similarity",
    ),
}
