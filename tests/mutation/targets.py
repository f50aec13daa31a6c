"""The modules that decide numbers, and the tests that have to notice a fault in them."""


def _tests(room: str, *names: str) -> tuple[str, ...]:
    return tuple(f"tests/{room}/test_{name}.py" for name in names)


TARGETS: dict[str, tuple[str, ...]] = {
    "circuits/algebra/circuit.py": _tests("circuits", "factored", "scales", "powers_of_two"),
    "circuits/algebra/spectrum.py": _tests("circuits", "spectrum", "scales", "powers_of_two"),
    "circuits/algebra/gram.py": _tests("circuits", "gram_matrices", "spectrum", "attention_weights"),
    "circuits/algebra/preconditioner.py": _tests("circuits", "preconditioner", "scales"),
    "circuits/algebra/measure.py": _tests("circuits", "scales", "powers_of_two"),
    "circuits/algebra/products.py": _tests("circuits", "factored", "factor_steps", "spectrum"),
    "circuits/algebra/exponents.py": _tests("circuits", "powers_of_two"),
    "circuits/weights/norms.py": _tests("circuits", "norms", "attention_weights"),
    "circuits/weights/rotary.py": _tests("circuits", "rotary", "attention_weights"),
    "circuits/weights/rope_scaling.py": _tests("circuits", "rope_scaling"),
    "circuits/weights/composition.py": _tests("circuits", "composition"),
    "analyses/dynamics/equations.py": _tests("analyses", "equations", "matched_loss"),
    "analyses/dynamics/first_integrals.py": _tests("analyses", "first_integrals", "matched_loss"),
    "analyses/dynamics/matched_loss.py": _tests("analyses", "matched_loss"),
    "analyses/dynamics/growth_laws.py": _tests("analyses", "growth_laws"),
    "analyses/dynamics/populations.py": _tests("analyses", "populations"),
    "analyses/dynamics/setting.py": _tests("analyses", "setting", "equations"),
    "analyses/dynamics/starts.py": _tests("analyses", "starts"),
    "analyses/trajectories/motion.py": _tests("analyses", "track", "circuit_table"),
    "analyses/attention/intervals.py": _tests("analyses", "intervals"),
    "analyses/attention/measures/rollout.py": _tests("analyses", "rollout"),
    "analyses/attention/measures/fusion.py": _tests("analyses", "rollout", "readout_rows"),
    "analyses/attention/measures/value_norms.py": _tests("analyses", "value_norms"),
    "analyses/attention/measures/gradient_rollout.py": _tests("analyses", "gradient_rollout"),
    "analyses/attention/relevance/dtap.py": _tests("analyses", "dtap"),
    "analyses/attention/relevance/summary.py": _tests("analyses", "relevance", "dtap"),
    "analyses/attention/relevance/relevant_tokens.py": _tests("analyses", "relevance"),
    "analyses/attention/rationales/faithfulness.py": _tests("analyses", "faithfulness", "perturbation"),
    "analyses/attention/rationales/perturbation.py": _tests("analyses", "perturbation", "faithfulness"),
    "analyses/attention/rationales/plausibility.py": _tests("analyses", "plausibility"),
    "probes/attention/measures.py": _tests("probes", "attention_probe", "attention_probe_sources"),
    "probes/attention/rollout_mass.py": _tests("probes", "attention_probe", "attention_probe_sources"),
    "probes/rates/proportional_steps.py": _tests("probes", "circuit_rates", "circuit_rates_hooks"),
    "reports/pages/page.py": _tests("reports", "page", "run_report"),
    "reports/drawing/panels.py": _tests("reports", "run_report"),
}
