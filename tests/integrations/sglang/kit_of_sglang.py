"""SGLang's own attention cases (``sglang.test.kits``) over an attncore backend.

Prints, as JSON, how many ran and which failed.

python kit_of_sglang.py NAME
"""

import json
import sys
import unittest

import torch

LAYOUTS = ("contiguous", "shuffled_pages", "interleaved_pages")


def cases_of(kit, name):
    """The kit's dense cases, with and without windows."""
    kit._SWA_DECODE_EXTEND_WINDOW = kit._SWA_DECODE_EXTEND_WINDOW | {name}
    return (
        *kit.make_dense_cases(name),
        *kit.make_swa_no_prefix_input_config_cases(name),
        *kit.make_swa_prefix_input_config_cases(name),
    )


def main(name):
    import sglang.srt.server_args  # noqa: F401  (the kit needs it imported first)
    from sglang.srt.plugins import load_plugins
    from sglang.test.kits.attention_unittest.attention_methods import dense_attention as kit

    torch.set_grad_enabled(False)
    load_plugins()
    failed, ran = [], 0
    for case in cases_of(kit, name):
        for layout in LAYOUTS:
            ran += 1
            try:
                kit.run_dense_attention_case(
                    unittest.TestCase(), case, dtype=torch.float32, device="cpu", loc_layout=layout
                )
            except Exception as error:  # a skip, too: the backend could not be made
                failed.append([case.name, layout, f"{type(error).__name__}: {error}"[:300]])
    print(json.dumps({"ran": ran, "failed": failed}))


if __name__ == "__main__":
    main(*sys.argv[1:])
