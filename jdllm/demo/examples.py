"""Texts that show what the demo model can do, for who does not know it: one or more of each task."""

PROMPTS = (
    "1234+567=",
    "503-128=",
    "sort diffusion=",
    "reverse language=",
    "copy banana without n=",
    "close ([{}(=",
    "ab=123;cd=456;xy=789;get cd=",
    "Tom has 4 red cups. Ann has 7 blue hats. What color are the hats?",
)

EXAMPLES = {
    "complete": PROMPTS,
    "chat": PROMPTS,
    "infill": (
        "Ann has 9 ⟦pink|blue⟧ boxes. What does Ann have?⟦24⟧",
        "reverse language=⟦8⟧",
        "1234+567=⟦1701|1801|1811⟧",
    ),
}
"""By the modes of the server's page; in an infilling ⟦8⟧ is so many tokens, ⟦a|b⟧ one of these texts."""
