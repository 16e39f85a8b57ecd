"""Faults of what a call returns and leaves behind; each names the test of the kit that must find it."""

from testing.faulty_backend import Fault, forward

STAY = "test_results_stay_as_they_were_returned"
LSE = "features={'lse'}"
WORKSPACE = """
def in_workspace(self, result, which):
    held = vars(self.backend).setdefault("held", {})
    room = held.setdefault((which, result.shape, result.dtype), torch.empty_like(result))
    return room.copy_(result)
Impl.in_workspace = in_workspace
"""
SUBCLASS = "\nclass Wrapped(torch.Tensor):\n    pass\n"


def of_workspace(where: str, *, kept: str = "output") -> str:
    """A layer whose results lie in one workspace for each shape, where ``where`` holds."""
    return (
        WORKSPACE
        + forward(f"""
answer = whole(query, key, value, kv_cache, metadata, output)
return self.in_workspace(answer, "output") if output is None and {where} and {kept == "output"} else answer
""")
        + forward(
            f"""
answer, lse = whole(query, key, value, kv_cache, metadata, output)
if output is None and {where} and {kept == "output"}:
    answer = self.in_workspace(answer, "output")
return answer, self.in_workspace(lse, "lse") if {where} and {kept == "lse"} else lse
""",
            "forward_with_lse",
        )
    )


RESULT_FAULTS = (
    Fault(
        "outputs_of_a_shape_in_one_workspace",
        f"{STAY}[forward]",
        "a call wrote to the output that an earlier call had returned, and returned its memory as its output",
        of_workspace("True"),
    ),
    Fault(
        "outputs_of_decodes_in_one_workspace",
        f"{STAY}[forward]",
        "a call wrote to the output that an earlier call had returned, and returned its memory as its output",
        of_workspace("not metadata.num_prefills"),
    ),
    Fault(
        "outputs_in_two_workspaces_that_take_turns",
        f"{STAY}[forward]",
        "a call wrote to the output that an earlier call had returned, and returned its memory as its output",
        WORKSPACE
        + forward("""
self.turn = 1 - getattr(self, "turn", 0)
answer = whole(query, key, value, kv_cache, metadata, output)
return self.in_workspace(answer, self.turn) if output is None else answer
"""),
    ),
    Fault(
        "an_output_that_the_next_call_uses_as_room",
        f"{STAY}[forward]",
        "a call wrote to the output that an earlier call had returned: it is the caller's",
        forward("""
if getattr(self, "room", None) is not None:
    self.room.fill_(0)
self.room = whole(query, key, value, kv_cache, metadata, output)
return self.room
"""),
    ),
    Fault(
        "log_sum_exps_of_a_shape_in_one_workspace",
        f"{STAY}[forward_with_lse]",
        "a call wrote to the log-sum-exp that an earlier call had returned, and returned its memory as its log-sum-exp",
        of_workspace("True", kept="lse"),
        LSE,
    ),
    Fault(
        "outputs_beside_a_log_sum_exp_in_one_workspace",
        f"{STAY}[forward_with_lse]",
        "a call wrote to the output that an earlier call had returned, and returned its memory as its output",
        WORKSPACE
        + forward(
            """
answer, lse = whole(query, key, value, kv_cache, metadata, output)
return self.in_workspace(answer, "output") if output is None else answer, lse
""",
            "forward_with_lse",
        ),
        LSE,
    ),
    Fault(
        "outputs_without_writing_in_one_workspace",
        f"{STAY}[write=False]",
        "a call wrote to the output that an earlier call had returned, and returned its memory as its output",
        of_workspace("not write"),
    ),
    Fault(
        "latent_outputs_in_one_workspace",
        f"{STAY}[latent cache]",
        "a call wrote to the output that an earlier call had returned, and returned its memory as its output",
        of_workspace("self.backend.config.use_mla"),
        "use_mla=True, head_size_v=MultipleOf(4)",
    ),
    Fault(
        "outputs_of_encoders_in_one_workspace",
        f"{STAY}[encoder]",
        "a call wrote to the output that an earlier call had returned, and returned its memory as its output",
        of_workspace("self.attn_type == 'encoder_only'"),
        "features={'encoder'}",
    ),
    Fault(
        "outputs_of_cross_layers_in_one_workspace",
        f"{STAY}[encoder_decoder]",
        "a call wrote to the output that an earlier call had returned, and returned its memory as its output",
        of_workspace("self.attn_type == 'encoder_decoder'"),
        "features={'encoder_decoder'}",
    ),
    Fault(
        "output_of_a_subclass",
        "test_prefill",
        "forward gave an output of type Wrapped; the contract says a plain strided tensor",
        SUBCLASS + forward("return whole(query, key, value, kv_cache, metadata, output).as_subclass(Wrapped)"),
    ),
    Fault(
        "output_of_a_subclass_of_encoders",
        "test_an_encoder_over_random_rows[encoder]",
        "forward gave an output of type Wrapped; the contract says a plain strided tensor",
        SUBCLASS
        + forward("""
answer = whole(query, key, value, kv_cache, metadata, output)
return answer.as_subclass(Wrapped) if self.attn_type == "encoder" else answer
"""),
        "features={'encoder'}",
    ),
    Fault(
        "log_sum_exp_of_a_subclass",
        "test_log_sum_exp_over_random_batches",
        "forward_with_lse gave a log-sum-exp of type Wrapped; the contract says a plain strided tensor",
        SUBCLASS
        + forward(
            """
answer, lse = whole(query, key, value, kv_cache, metadata, output)
return answer, lse.as_subclass(Wrapped)
""",
            "forward_with_lse",
        ),
        LSE,
    ),
    Fault(
        "no_output",
        "test_prefill",
        "forward gave an output of type NoneType; the contract says a tensor",
        forward("whole(query, key, value, kv_cache, metadata, output)"),
    ),
    Fault(
        "default_dtype_changed_by_forward",
        "test_prefill",
        "forward left settings of torch changed, which are the engine's: default dtype: torch.float64 found, "
        "torch.float32 before",
        forward("""
answer = whole(query, key, value, kv_cache, metadata, output)
torch.set_default_dtype(torch.float64)
return answer
"""),
    ),
    Fault(
        "gradients_disabled_by_forward_with_lse",
        "test_log_sum_exp_over_random_batches",
        "forward_with_lse left settings of torch changed, which are the engine's: gradients: False found, True before",
        forward(
            """
answer = whole(query, key, value, kv_cache, metadata, output)
torch.set_grad_enabled(False)
return answer
""",
            "forward_with_lse",
        ),
        LSE,
    ),
    Fault(
        "threads_changed_by_plan",
        "test_prefill",
        "plan left settings of torch changed, which are the engine's: number of threads: ",
        """
def plan(self, metadata):
    super(Backend, self).plan(metadata)
    torch.set_num_threads(torch.get_num_threads() % 2 + 1)
Backend.plan = plan
""",
    ),
)
