"""The stored part of OpenAI's Responses API: responses, their events while in progress, conversations."""
