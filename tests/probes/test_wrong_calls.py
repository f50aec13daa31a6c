"""Arguments of the wrong type are named in one line, with what was expected and what came."""

import json
import subprocess
import sys
from pathlib import Path

PAIRS = "maps should be 'all' or pairs (layer, head), got "
NUMBERS = " should be a tensor, or numbers that torch can make a tensor of, got "
STEPS = "every should be a whole number of at least 1, some steps, or a function of the step, got "
PARAMS = "a parameter group should have the key 'params', got "
EXPECTED = {
    "measures": "measures should be some of entropy, relevant, sink, self, previous, next, largest, no_token, "
    "max_logit, rollout, got 3",
    "rollout": "rollout should be a Rollout, got 'none'; to leave it out, leave it out of measures",
    "maps, one pair": PAIRS + "(0, 1)",
    "maps, a number": PAIRS + "3",
    "relevant": "relevant" + NUMBERS + "str (new(): invalid data type 'str')",
    "readout": "readout" + NUMBERS + "NoneType (Could not infer dtype of NoneType)",
    "every": STEPS + "1.5",
    "every, steps": STEPS + "'epoch'",
    "start": "start should be a number of steps, got 1.5",
    "rotary_offset": "the rotary offset should be a whole number of positions, got 0.5",
    "directions": "directions should be TaskDirections, got str",
    "log": "log should be a function of a step and its values, got 'wandb'",
    "log_filter": "log_filter should be a LogFilter or a function of a name, got 'all'",
    "log_filter, heads": "a head should be its layer and number, such as (5, 1), got 5",
    "log_filter, a number": "a head should be its layer and number, such as (5, 1), got (5, 1.5)",
    "log_filter, one name": "medians should be a list of names of columns, got 'frobenius_norm'",
    "log_filter, names": "largest should be a list of names of columns, got [3]",
    "mapping": "mapping should be a Mapping, as read_mapping(path) returns it, got str",
    "options": "options should be ReadingOptions or a Mapping, got dict",
    "loss": "loss should be a number to store with the step, got a tensor of shape [3]",
    "scalar": "rate should be a number to store with the step, got '0.1'",
    "attach": "expected a torch.optim.Optimizer, or several in a list, got StepLR",
    "limit": "limit should be a finite number above 0, got '100'",
    "horizon": "horizon should be a whole number of at least 1, got 1.5",
    "health, start": "start should be a number of steps, got True",
    "tell": "tell should be a function of a sentence, or None, got 'loud'",
    "columns": "columns should be a function that returns values of heads, got {}",
    "guard": "guard should be a finite number above 0, got '100'",
    "guard_by": "guard_by should be 'rate' or 'clip', got 'norm'",
    "lr": "the base rate lr should be a finite number of at least 0, got '1e-3'",
    "qk": "the multiplier qk should be a finite number above 0, got '30'",
    "qk of layers": "qk is a list: make it a tensor [layer] or [layer, head], or a mapping",
    "qk of a layer": "the multiplier qk of 0 should be a finite number above 0, got '30'",
    "ov of no layer": "ov names None, but the model has layer 0 with this circuit: a key is a layer's number, "
    "(stack, number), or its name, and for one head (number, head) or (stack, number, head)",
    "groups, parameters": PARAMS + "Parameter",
    "groups, one group": PARAMS + "str",
    "params": "the params of a group should be parameters, got int",
    "params, names": "the params of a group should be parameters, got str",
    "optimizer": "expected a torch.optim.Optimizer, or several in a list, got StepLR",
    "optimizers": "expected a torch.optim.Optimizer, or several in a list, got NoneType",
}


def test_every_wrong_call_is_one_clear_line():
    # In a process of its own: what checks annotations in the tests would be there first.
    command = [sys.executable, "-m", "tests.probes.wrong_calls"]
    found = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]).stdout
    assert json.loads(found) == EXPECTED
