"""PINA: a physics-informed network of an ordinary differential equation; an epoch has one step."""

from pina import Condition, Trainer
from pina.domain import CartesianDomain
from pina.equation import Equation
from pina.equation.zoo import FixedValue
from pina.model import FeedForward
from pina.operator import grad
from pina.problem import SpatialProblem
from pina.solver import PhysicsInformedSingleModelSolver
from recording import Recording


def growth(points, values):
    """The residual of du/dx = u."""
    return grad(values, points, components=["u"], d=["x"]) - values.extract(["u"])


class Growth(SpatialProblem):
    output_variables = ["u"]  # noqa: RUF012
    spatial_domain = CartesianDomain({"x": [0, 1]})
    domains = {"start": CartesianDomain({"x": 0.0}), "inside": CartesianDomain({"x": [0, 1]})}  # noqa: RUF012
    conditions = {  # noqa: RUF012
        "start": Condition(domain="start", equation=FixedValue(1.0)),
        "inside": Condition(domain="inside", equation=Equation(growth)),
    }


if __name__ == "__main__":
    recording = Recording(seed=1)
    problem = Growth()
    problem.discretise_domain(n=100, mode="grid", domains=["start", "inside"])
    model = FeedForward(input_dimensions=1, output_dimensions=1, layers=[64, 64])
    solver = PhysicsInformedSingleModelSolver(problem, model)
    trainer = Trainer(solver, max_epochs=1000 * recording.times, accelerator="cpu", callbacks=[recording.callback()])
    with recording:
        trainer.train()
