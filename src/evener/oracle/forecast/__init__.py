"""Forecasts: what every way of dividing a model over given machines would cost, and which of them to take.

outlook = search(Scenario(Job(graph=graph, batch_size=256), profile))
plan, words = plan_of(outlook), advice(outlook)
"""

from evener.oracle.forecast.advice import advice, plan_of
from evener.oracle.forecast.learn import learn
from evener.oracle.forecast.machines import imagine
from evener.oracle.forecast.quote import Quote
from evener.oracle.forecast.scale import Curve, scale
from evener.oracle.forecast.scenario import Job, Scenario
from evener.oracle.forecast.search import Outlook, search

__all__ = ["Curve", "Job", "Outlook", "Quote", "Scenario", "advice", "imagine", "learn", "plan_of", "scale", "search"]
