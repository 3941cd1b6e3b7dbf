"""The kept part of OpenAI's Responses API: responses, their events while they are made, conversations."""
